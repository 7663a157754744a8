"""The sleep of services between two ticks."""

import asyncio

from shared.alarm import Alarm
from shared.clock import MonotonicClock
from tests.conftest import RunAsync


def test_a_moment_brought_forward_ends_the_sleep(run_async: RunAsync) -> None:
    """A deadline that came up meanwhile would wait for the one that was known before."""

    async def main() -> None:
        clock = MonotonicClock()
        alarm = Alarm(clock)
        sleep = asyncio.create_task(alarm.sleep_until(clock.now() + 3600.0))
        await asyncio.sleep(0)
        alarm.no_later_than(clock.now() + 7200.0)
        alarm.no_later_than(clock.now() + 0.01)
        await sleep
        alarm.no_later_than(0.0)

    run_async(main())


def test_the_sleep_ends_no_earlier_than_its_moment(run_async: RunAsync) -> None:
    """Ringing a fraction of a millisecond early, a service would spin until it is time."""

    async def main() -> None:
        clock = MonotonicClock()
        alarm = Alarm(clock)
        for step in range(20):
            at = clock.now() + step * 0.00037
            await alarm.sleep_until(at)
            assert clock.now() >= at

    run_async(main())
