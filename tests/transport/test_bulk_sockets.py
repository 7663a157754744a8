"""Several sockets towards one source: what is lost with one of them, and what is not."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shared.config import Seconds
from shared.fault_rules import ChunkFault
from shared.transport.bulk.fetches import FetchLimits
from shared.transport.bulk.reader import Fetched
from tests.transport.harness import Context
from tests.transport.relay import Relay
from tests.transport.test_bulk_link import CHUNKS, DEADLINE, SOURCE, Ends

THREE = FetchLimits(slots=18, stall=1.0, attempts=4, sockets=3)
SHARE = CHUNKS // 3
HELD = ChunkFault(kind="stall", chunk=0, delay=Seconds(0.1))


@contextmanager
def relayed(context: Context, *faults: ChunkFault) -> Iterator[tuple[Ends, Relay]]:
    """Open three sockets through a relay."""
    ends = Ends(context, THREE, probe=DEADLINE)
    relay = Relay(ends.serve("tcp://127.0.0.1:0", *faults))
    try:
        opened = ends.open(relay.endpoint)
        assert opened.error is None, opened.error
        assert relay.accepted == 3
        yield ends, relay
    finally:
        ends.close()
        relay.close()


@pytest.mark.parametrize("number", range(3))
def test_a_connection_that_is_cut_costs_its_own_chunks_only(context: Context, number: int) -> None:
    """Guards a fetch that starts over, or fails, because one of three connections broke."""
    with relayed(context, HELD) as (ends, relay):
        ends.start()
        relay.cut(number)
        outcome = ends.outcomes.get(timeout=DEADLINE)
        assert isinstance(outcome, Fetched) and ends.equal()
        assert outcome.again <= SHARE
        assert isinstance(ends.fetch(range(8, 16)), Fetched) and ends.equal(range(8, 16))


@pytest.mark.parametrize("number", range(3))
def test_what_a_silent_connection_owes_comes_by_the_next_one(context: Context, number: int) -> None:
    """Guards a path that swallows one of three connections for good, and says nothing."""
    with relayed(context) as (ends, relay):
        relay.silence(number)
        outcome = ends.fetch()
        assert isinstance(outcome, Fetched) and ends.equal()
        assert outcome.again == SHARE
        second = ends.fetch(range(8, 16))
        assert isinstance(second, Fetched) and second.again == 0, "it is left out for a while"
        assert ends.equal(range(8, 16))


def test_the_self_test_must_pass_over_every_connection(context: Context) -> None:
    """Guards a pair that is called proven though one of its connections carries nothing."""
    ends = Ends(context, THREE)
    relay = Relay(ends.serve())
    relay.silence(2)
    opened = ends.open(relay.endpoint)
    assert opened.error is not None and "did not answer the self-test" in opened.error.message
    ends.close()
    relay.close()


def test_a_source_that_is_dropped_closes_every_socket(context: Context) -> None:
    """Guards sockets left behind by each source that ever was."""
    with relayed(context) as (ends, relay):
        ends.reader.drop(SOURCE)
        assert ends.open(relay.endpoint).error is None
        assert relay.accepted >= 6
        assert isinstance(ends.fetch(), Fetched) and ends.equal()
