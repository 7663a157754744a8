"""The `host` path without sockets: whatever the wire does, no job hangs and no byte is wrong."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from shared.kv.layout import KvLayout, LayerKv
from shared.messages.bulk import CancelFetch, Credit, Fetch
from shared.transport.bulk.fetches import Done, Failed, FetchLimits, Send
from shared.transport.bulk.plan import plan_chunks
from shared.transport.bulk.servings import Servings
from tests.unit.bulk_world import CHUNK, LAYOUT, PEER, PEERS, Wire, live

LIMITS = FetchLimits(slots=6, stall=1.0, attempts=4)
ALL = range(len(LAYOUT.layers))


def check_end(wire: Wire) -> None:
    assert len(wire.reader) == 0 and not wire.reader.take()
    assert set(wire.outcomes) == set(wire.wanted), "a job was never answered"
    for outcome in wire.outcomes.values():
        if isinstance(outcome, Failed):
            assert outcome.error.code == "transfer_failed" and outcome.error.message
    assert sum(o.spoiled for o in wire.outcomes.values()) == wire.reader.spoiled


@pytest.mark.parametrize("sockets", [1, 3])
@pytest.mark.parametrize("seed", range(20))
def test_five_hundred_jobs_over_a_bad_wire(seed: int, sockets: int) -> None:
    """Guards stale bytes, leaked slots and jobs without an end (14, 24-26, 29, 32, 41): 10,000.

    With several connections each is cut now and then for a while.
    """
    wire = live(seed, 500 if sockets == 1 else 200, replace(LIMITS, sockets=sockets))
    check_end(wire)
    done = sum(isinstance(outcome, Done) for outcome in wire.outcomes.values())
    # Three times the messages in as many moments: more blocks are used anew on the way.
    assert done > len(wire.outcomes) // (4 if sockets == 1 else 10)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_any_window_and_any_number_of_attempts(
    seed: int, slots: int, attempts: int, sockets: int
) -> None:
    """Guards a window of one and a reader without retries, over any number of sockets."""
    limits = FetchLimits(slots=slots, stall=1.0, attempts=attempts, sockets=sockets)
    check_end(live(seed, 25, limits))


def test_an_undisturbed_wire_needs_no_second_attempt() -> None:
    wire = Wire([], LIMITS)
    for number in range(6):
        wire.begin([number], [number + 6], ALL)
    while wire.step():
        pass
    check_end(wire)
    assert wire.reader.late == wire.reader.spoiled == 0
    assert all(isinstance(o, Done) and o.again == 0 for o in wire.outcomes.values())


@pytest.mark.parametrize("sockets", [1, 3])
def test_never_more_chunks_on_their_way_than_slots(sockets: int) -> None:
    """Guards the reader's memory when it is slow (26), and credits that count per socket."""
    limits = FetchLimits(slots=2, stall=1.0, sockets=sockets)
    wire = Wire([], limits)
    for number in range(8):
        wire.begin([number], [number + 8], ALL)
    while wire.up or wire.server.sendable or wire.down:
        while wire.up:
            wire._deliver_up()
        while wire.server.sendable:
            wire._send()
        assert len(wire.down) <= limits.slots
        if wire.down:
            wire._deliver_down()
    check_end(wire)


def test_a_source_that_hangs_leaves_slots_to_the_others() -> None:
    """Guards one bad peer pinning the whole window (6)."""
    wire = Wire([], FetchLimits(slots=4, stall=1.0))
    for number in range(4):
        fetch = Fetch(
            job=100 + number,
            attempt=0,
            arena=99,
            first_layer=0,
            end_layer=4,
            blocks=(1,),
            generations=(1,),
            chunk_bytes=CHUNK,
            need=(),
            credit=0,
        )
        wire.wanted[100 + number] = (fetch, (20,), [])
        wire.reader.begin(99, fetch, 3, wire.now)
    job = wire.begin([2], [3], ALL)
    while wire.step():
        pass
    assert isinstance(wire.outcomes[job], Done)


def test_a_restarted_source_refuses_what_its_former_life_announced() -> None:
    """Guards KV of another life at the same address (3, 75)."""
    wire = Wire([], LIMITS)
    job = wire.begin([1], [2], ALL)
    message = wire.up.popleft().message
    assert isinstance(message, Fetch)
    refusal = Servings(LAYOUT, 24, arena=2).fetch(PEER, message, 0.0)
    assert refusal is not None and refusal.reason == "arena"
    wire.reader.refused(1, refusal, wire.now)
    wire._carry_out()
    outcome = wire.outcomes[job]
    assert isinstance(outcome, Failed) and "restarted" in outcome.error.message


def test_chunks_are_divided_evenly_and_so_is_the_credit() -> None:
    """Guards a second socket that has nothing to do until the first one is done."""
    wire = Wire([], FetchLimits(slots=12, stall=1.0, sockets=3))
    wire.begin([1, 2, 3, 4], [5, 6, 7, 8], ALL)
    sent = list(wire.up)
    fetches = [s.message for s in sent if isinstance(s.message, Fetch)]
    assert [s.lane for s in sent] == [0, 1, 2] and len(fetches) == 3
    assert [f.credit for f in fetches] == [2, 2, 2], "half of the slots, for one source"
    counts = [sum(end - first for first, end in f.need) for f in fetches]
    assert max(counts) - min(counts) <= 1
    assert [f.need[0][0] for f in fetches] == [0, counts[0], counts[0] + counts[1]]
    assert len({f.job for f in fetches}) == 3


def test_small_jobs_take_turns_on_the_connections() -> None:
    """Guards all layers that are announced one by one going over the first of three sockets."""
    wire = Wire([], FetchLimits(slots=12, stall=1.0, sockets=3))
    for number in range(6):
        fetch = Fetch(
            job=100 + number,
            attempt=0,
            arena=1,
            first_layer=0,
            end_layer=1,
            blocks=(1,),
            generations=(1,),
            chunk_bytes=CHUNK,
            need=(),
            credit=0,
        )
        wire.reader.begin(1, fetch, 1, wire.now)
    assert [s.lane for s in wire.reader.take() if isinstance(s, Send)] == [0, 1, 2, 0, 1, 2]


def test_a_lost_connection_spoils_its_own_chunks_only_and_they_come_by_another() -> None:
    """Guards a job that fails, or is fetched anew, for one of three connections."""
    wire = Wire([], FetchLimits(slots=12, stall=1.0, sockets=3))
    wire.cut = {PEERS[1]}
    job = wire.begin([1, 2, 3, 4], [5, 6, 7, 8], ALL)
    mine = [s.message for s in wire.up if s.lane == 1]
    while wire.step():
        pass
    assert job not in wire.outcomes
    wire.tick(1.0)
    asked = [(s.lane, s.message) for s in wire.up]
    again = [m for lane, m in asked if lane == 2 and isinstance(m, Fetch)]
    assert [type(m) for lane, m in asked if lane == 1] == [CancelFetch]
    assert [m.need for m in again] == [m.need for m in mine if isinstance(m, Fetch)]
    while wire.step():
        pass
    outcome = wire.outcomes[job]
    assert isinstance(outcome, Done) and outcome.again == 2, "what was granted and never came"
    wire.begin([9, 10, 11], [12, 13, 14], ALL)
    assert {s.lane for s in wire.up} == {0, 2}, "the silent connection is left out"
    wire.tick(4.0)
    wire.begin([15, 16, 17], [18, 19, 20], ALL)
    assert {s.lane for s in wire.up} == {0, 1, 2}, "and tried again after a while"


def test_a_part_that_fails_takes_the_others_with_it_once() -> None:
    """Guards two answers to one job, and chunks that are sent for nobody."""
    wire = Wire([], FetchLimits(slots=12, stall=1.0, sockets=3))
    job = wire.begin([1, 2, 3, 4], [5, 6, 7, 8], ALL)
    wire.theirs.stamp(3)
    while wire.step():
        pass
    check_end(wire)
    outcome = wire.outcomes[job]
    assert isinstance(outcome, Failed) and outcome.reused == 1
    assert not len(wire.server), "cancelled at the source"


@pytest.mark.parametrize(
    "wrong",
    [
        {"blocks": (24,)},
        {"blocks": (-1,)},
        {"generations": ()},
        {"generations": (-1,)},
        {"end_layer": 9},
        {"first_layer": 3, "end_layer": 2},
        {"chunk_bytes": 0},
        {"chunk_bytes": 1 << 30},
        {"need": ((0, 99),)},
        {"need": ((2, 1),)},
    ],
)
def test_a_fetch_of_what_is_not_there_is_refused(wrong: dict[str, object]) -> None:
    """Guards reads outside the pool, and plans as large as a peer likes."""
    good: dict[str, object] = {
        "job": 1,
        "attempt": 1,
        "arena": 1,
        "first_layer": 0,
        "end_layer": 4,
        "blocks": (1,),
        "generations": (1,),
        "chunk_bytes": CHUNK,
        "need": ((0, 1),),
        "credit": 1,
    }
    servings = Servings(LAYOUT, 24, arena=1)
    assert servings.fetch(PEER, Fetch(**good), 0.0) is None  # type: ignore[arg-type]
    refusal = servings.fetch(PEER, Fetch(**(good | wrong)), 0.0)  # type: ignore[arg-type]
    assert refusal is not None and refusal.reason == "invalid"
    assert not len(servings)


def test_readers_that_vanish_are_forgotten() -> None:
    """Guards a table that grows with every reader that ever died (30)."""
    servings = Servings(LAYOUT, 24, arena=1, idle=60.0)
    for job in range(1500):
        fetch = Fetch(
            job=job,
            attempt=1,
            arena=1,
            first_layer=0,
            end_layer=4,
            blocks=(1,),
            generations=(1,),
            chunk_bytes=CHUNK,
            need=((0, 1),),
            credit=0,
        )
        refusal = servings.fetch(PEER, fetch, 0.0)
        assert (refusal is None) == (job < 1024)
    servings.credit(PEER, Credit(job=1499, attempt=1, chunks=3), 1.0)
    assert servings.expire(61.0) == 1024 and not len(servings)


@given(
    st.integers(1, 40),
    st.integers(1, 4096),
    st.sampled_from([(1, 4, 4), (3, 64, 64), (2, 8, 4), (8, 128, 128)]),
)
def test_a_plan_covers_every_byte_once(
    blocks: int, chunk_bytes: int, shape: tuple[int, int, int]
) -> None:
    """Guards gaps, overlaps and oversized chunks at every boundary (36, 37)."""
    layers = (LayerKv(*shape), LayerKv(*shape, shares=0), LayerKv(*shape))
    layout = KvLayout(dtype="fp16", block_size=4, layers=layers)
    seen = set()
    unit = max(layout.k_block_bytes(0), layout.v_block_bytes(0))
    for chunk in plan_chunks(layout, range(3), blocks, chunk_bytes):
        size = 0
        for segment in chunk.segments:
            one = (layout.k_block_bytes, layout.v_block_bytes)[segment.part](segment.layer)
            size += one * (segment.end - segment.first)
            for position in range(segment.first, segment.end):
                assert (segment.layer, segment.part, position) not in seen
                seen.add((segment.layer, segment.part, position))
        assert size == chunk.size <= max(chunk_bytes, unit)
    assert len(seen) == 2 * 2 * blocks
