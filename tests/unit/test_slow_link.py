"""A simulated link keeps order, takes as long as it says, and loses what it says."""

from hypothesis import given
from hypothesis import strategies as st

from tools.slow_link.shaping import Direction, LinkProfile


def packet(size: int) -> memoryview:
    return memoryview(bytes(size))


def test_a_packet_takes_its_time_on_the_wire_and_the_delay() -> None:
    """Guards figures of a link that is faster than it claims."""
    link = Direction(LinkProfile(rate=1000.0, delay=0.5), 1)
    assert link.take(packet(100), 0.0)
    assert link.take(packet(100), 0.0)
    assert link.due(0.59) == []
    assert link.wait(0.0) == 0.6
    assert len(link.due(0.6)) == 1
    assert len(link.due(0.7)) == 1
    assert link.wait(0.7) is None


def test_a_full_queue_loses_what_comes() -> None:
    """Guards memory without bound behind a slow link."""
    link = Direction(LinkProfile(rate=1000.0, queue=250), 1)
    assert [link.take(packet(100), 0.0) for _ in range(4)] == [True, True, True, False]


def test_without_a_rate_a_packet_waits_for_the_delay_only() -> None:
    """Guards a division by the rate that is not there."""
    link = Direction(LinkProfile(delay=0.25), 1)
    assert link.take(packet(1 << 16), 1.0)
    assert link.wait(1.0) == 0.25


@given(loss=st.floats(0.0, 0.9), seed=st.integers(0, 1 << 30), rate=st.sampled_from([0.0, 1e6]))
def test_loss_has_its_share_and_the_rest_keeps_its_order(
    loss: float, seed: int, rate: float
) -> None:
    """Guards a link that swaps packets, or loses others than it counts."""
    link = Direction(LinkProfile(rate=rate, loss=loss), seed)
    sent = [memoryview(number.to_bytes(4, "big")) for number in range(2000)]
    kept = [one for number, one in enumerate(sent) if link.take(one, number * 1e-3)]
    assert [bytes(one) for one in link.due(10.0)] == [bytes(one) for one in kept]
    assert link.passed + link.lost == len(sent)
    assert abs(link.lost / len(sent) - loss) < 0.08
