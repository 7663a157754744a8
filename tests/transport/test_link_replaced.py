"""A peer that connects anew while its former connection is not yet read to its end."""

import time
from collections.abc import Callable
from typing import Any

import msgspec

from tests.transport.harness import (
    Context,
    Message,
    Note,
    Requests,
    Router,
    eventually,
    opened,
    raw_dealer,
)

Run = Callable[..., Any]


def stand_still() -> None:
    """Block the loop while the sockets go on, as a stopped process does."""
    time.sleep(0.2)


def test_what_a_replaced_connection_left_unread_comes_from_nobody(
    run: Run, context: Context, endpoint: str
) -> None:
    """After a stop of the router its workers have connected anew; libzmq then hands out what
    the former connections had sent, under names of its own. A hello among it pushed the living
    worker out of the table."""

    async def main() -> None:
        requests = Requests()
        router = Router(context, endpoint, Message, requests.put_from)
        first = raw_dealer(context, router.endpoint, b"w#1")
        with opened(router):
            first.send(msgspec.msgpack.encode(Note(1)))
            stand_still()
            first.close(linger=1000)
            stand_still()
            second = raw_dealer(context, router.endpoint, b"w#1")
            with opened(second):
                second.send(msgspec.msgpack.encode(Note(2)))
                stand_still()
                await eventually(lambda: len(requests.items) + router.rejected == 2)
        assert requests.items == [(b"w#1", Note(2))]
        assert router.rejected == 1

    run(main())
