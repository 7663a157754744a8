"""Who is told of which prefill worker with the router's beat, before any request."""

from services.router.introductions import PER_BEAT
from services.router.state import BEAT_INTERVAL
from shared.messages.router_worker import KvPeer, RouterBeat
from tests.unit.router_world import SplitWorld, World


def told(world: World, reader: bytes) -> list[tuple[str, int]]:
    """Let a beat pass and return whom this worker was told of, and which life."""
    world.wait(BEAT_INTERVAL, *world.state.fleet.by_peer)
    beats = world.to(reader, RouterBeat)
    return [(str(p.worker), int(p.incarnation)) for beat in beats for p in beat.sources]


def test_a_decode_worker_is_told_of_each_prefill_worker_once() -> None:
    """Guards a path that is found only when the first request waits for it."""
    world = SplitWorld(prefills=2, decodes=1)
    world.wait(BEAT_INTERVAL, *world.state.fleet.by_peer)
    peers = [peer for beat in world.to(world.decodes[0], RouterBeat) for peer in beat.sources]
    hello = world.state.fleet.by_peer[world.prefills[0]].hello
    assert peers[0] == KvPeer(
        worker=hello.worker, incarnation=hello.incarnation, endpoint=hello.kv_endpoint
    )
    assert [p.worker for p in peers] == ["prefill-0", "prefill-1"]
    assert told(world, world.decodes[0]) == []
    assert told(world, world.prefills[0]) == []


def test_a_source_that_joins_later_or_in_another_life_is_introduced() -> None:
    """Guards a fleet that grows or heals, whose new pairs nobody has tried."""
    world = SplitWorld(prefills=1, decodes=1)
    assert told(world, world.decodes[0]) == [("prefill-0", 1)]
    world.worker("prefill-0", 2)
    world.worker("prefill-1", 3)
    assert told(world, world.decodes[0]) == [("prefill-0", 2), ("prefill-1", 3)]


def test_either_side_that_is_back_meets_what_it_missed() -> None:
    """Guards a partition after which a pair stays unknown."""
    world = SplitWorld(prefills=1, decodes=1)
    (source,), (reader,) = world.prefills, world.decodes
    assert told(world, reader) == [("prefill-0", 1)]
    world.wait(20.0, reader)
    assert world.health(source) == "lost"
    world.report(source)
    assert told(world, reader) == [("prefill-0", 1)]
    world.wait(20.0, source)
    assert world.health(reader) == "lost"
    world.worker("prefill-1")
    world.report(reader)
    assert told(world, reader) == [("prefill-1", 1)]


def test_a_fleet_of_many_pairs_is_introduced_bit_by_bit() -> None:
    """Guards every reader greeting every source in one second."""
    world = SplitWorld(prefills=24, decodes=12)
    met: list[tuple[bytes, tuple[str, int]]] = []
    beats = -(-24 * 12 // PER_BEAT)
    for beat in range(beats + 1):
        world.wait(BEAT_INTERVAL, *world.state.fleet.by_peer)
        new = [
            (reader, (str(p.worker), int(p.incarnation)))
            for reader in world.decodes
            for message in world.to(reader, RouterBeat)
            for p in message.sources
        ]
        assert len(new) <= PER_BEAT and bool(new) == (beat < beats)
        met += new
    assert len(met) == len(set(met)) == 24 * 12


def test_a_source_that_restarts_with_every_beat_is_heard_of_by_all() -> None:
    """Guards readers that meet nobody while a crashing source uses up what a beat may tell."""
    readers = PER_BEAT + 6
    world = SplitWorld(prefills=1, decodes=readers)
    met: set[bytes] = set()
    for life in (2, 3):
        world.worker("prefill-0", life)
        world.wait(BEAT_INTERVAL, *world.state.fleet.by_peer)
        met |= {r for r in world.decodes if any(b.sources for b in world.to(r, RouterBeat))}
    assert len(met) == readers


def test_a_worker_whose_role_changes_is_introduced_as_what_it_is_now() -> None:
    """Guards a decode worker that became a prefill worker unnoticed."""
    world = SplitWorld(prefills=1, decodes=2)
    told(world, world.decodes[0])
    world.worker("decode-1", 1, role="prefill")
    assert told(world, world.decodes[0]) == [("decode-1", 1)]
    world.worker("decode-1", 1, role="decode")
    assert told(world, world.decodes[1]) == [("prefill-0", 1)]


def test_nobody_is_introduced_where_nothing_is_split() -> None:
    world = World(deployment_type="colocated")
    mixed = world.worker("mixed-0")
    world.worker("mixed-1")
    assert told(world, mixed) == []
