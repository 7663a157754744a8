"""Random lives of a P/D fleet: whatever happens, every stream is right and nothing leaks."""

import random
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.ids import WorkerId
from shared.messages.fleet import PipelineRule
from shared.worker.events import Tick
from shared.worker.limits import WorkerLimits
from tests.unit.worker_router import FakeRouter, check_end
from tests.unit.worker_world import VOCAB, Windows

LIMITS = WorkerLimits(
    max_batch_tokens=6,
    max_sequences=4,
    max_model_len=60,
    vocab_size=VOCAB,
    layers=3,
    max_open=16,
    lease=30.0,
    heartbeat=5.0,
    handshake_timeout=5.0,
)
WINDOWS: Windows = (6, None, 3)
PROMPTS = ((1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12), (1, 2, 3, 4, 5, 6, 8, 9), (30, 31, 32), (20,) * 9)
BLOCKS = {"prefill-0": 9, "prefill-1": 14, "decode-0": 11}


def act(router: FakeRouter) -> None:
    """Let one thing happen."""
    world = router.world
    fate = world.choose(250)
    if 0 < fate <= 10 and sum(o.state == "open" for o in router.requests) < 9:
        prompt = PROMPTS[world.choose(4)] + tuple(range(world.choose(7)))
        ttl = 2.0 if world.choose(12) == 1 else 1e6
        router.submit(prompt, world.choose(3), 1 + world.choose(24), ttl)
    elif fate in (11, 12) and router.requests:
        router.cancel(router.requests[-1 - world.choose(min(9, len(router.requests)))])
    elif fate == 13:
        router.kill(list(BLOCKS)[world.choose(3)])
    elif fate == 14 and world.choose(4) == 1:
        router.restart()
    elif 15 <= fate <= 22:
        pass_time(router, (0.1, 1.0, 6.0, 31.0)[world.choose(16) // 5])
    else:
        step(router)


def step(router: FakeRouter, pick: Callable[[int], int] | None = None) -> bool:
    """Let one pending thing proceed, chosen by fate or ``pick``; False when nothing is pending."""
    moves: list[Callable[[], None]] = router.world.moves()
    for node in router.world.nodes.values():
        if node.alive and router.mail[node.peer]:
            moves.append(lambda n=node: router.deliver(n))  # type: ignore[misc]
    if moves:
        moves[(pick or router.world.choose)(len(moves))]()
    return bool(moves)


def pass_time(router: FakeRouter, seconds: float) -> None:
    """Move the clock and tick everybody."""
    router.world.now += seconds
    for node in list(router.world.nodes.values()):
        router.world.handle(node, Tick())


def live(tape: list[int], windows: Windows = (), pipeline: PipelineRule = "auto") -> FakeRouter:
    """Live through the tape, then until nothing is left to do, without further harm."""
    limits = msgspec.structs.replace(LIMITS, windows=windows, pipeline=pipeline)
    router = FakeRouter(tape, limits, BLOCKS)
    for prompt in PROMPTS:
        router.submit(prompt, 1, 9, 1e6)
    while not router.world.ended:
        act(router)
    for _ in range(400):
        while step(router):
            pass
        pass_time(router, 1.0)
        if all(open_.state != "open" for open_ in router.requests) and all(
            node.state.idle for node in router.world.nodes.values()
        ):
            break
    check_end(router)
    return router


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.integers(0, 2**20), max_size=400),
    st.sampled_from(((), WINDOWS)),
    st.sampled_from((True, False, "auto")),
)
def test_any_life_ends_well(tape: list[int], windows: Windows, pipeline: PipelineRule) -> None:
    """Guards conservation, exactly-once tokens and unverified KV under every kind of trouble."""
    live(tape, windows, pipeline)


@pytest.mark.parametrize("seed", range(16))
def test_a_long_life_ends_well(seed: int) -> None:
    """Guards the same over lives longer than hypothesis cares to draw."""
    random_tape = random.Random(seed)
    tape = [random_tape.randrange(2**20) for _ in range(8000)]
    router = live(tape, WINDOWS if seed % 2 else (), (True, "auto", False)[seed % 3])
    assert any(open_.state == "finished" for open_ in router.requests)


@pytest.mark.parametrize("seed", range(8))
def test_a_window_hides_no_block_that_a_cached_prefix_needs(seed: int) -> None:
    """Guards a prefix found in the cache whose windowed layers never came, or came in part.

    Long prompts that share beginnings of every length, so that the window of one ends where
    another one's prefix does.
    """
    dice = random.Random(seed)
    limits = msgspec.structs.replace(LIMITS, windows=WINDOWS)
    router = FakeRouter([], limits, {"prefill-0": 40, "prefill-1": 40, "decode-0": 40})
    base = tuple(dice.randrange(VOCAB) for _ in range(44))
    for _ in range(24):
        start = base[: dice.randrange(1, 44)]
        router.submit((*start, *range(dice.randrange(6))), 1, 1 + dice.randrange(8), 1e6)
        while step(router):
            pass
        pass_time(router, 1.0)
    check_end(router)
    assert all(open_.state == "finished" for open_ in router.requests)


def test_parked_loads_never_lock_a_full_pool() -> None:
    """Guards 53, 54: sequences that wait for KV, hold blocks and cannot be evicted, all at once.

    The decode worker holds little more than one of them at its full length, and everything is
    asked for at once. Nothing fails or is lost on the way: only memory is short.
    """
    preempted = 0
    for seed in range(24):
        dice = random.Random(seed)
        blocks = {"prefill-0": 16, "prefill-1": 16, "decode-0": 9 + seed % 4}
        router = FakeRouter([], LIMITS, blocks)
        for number in range(12):
            prompt = tuple(dice.randrange(VOCAB) for _ in range(dice.randrange(1, 12)))
            router.submit(prompt, number, dice.randrange(1, 24), 1e6)
        moves = 0
        for _ in range(60):
            while step(router, dice.randrange):
                moves += 1
                assert moves < 50_000, "work goes round in circles"
            pass_time(router, 1.0)
        check_end(router)
        assert all(open_.state == "finished" for open_ in router.requests)
        preempted += router.counters[WorkerId("decode-0")].preemptions
    assert preempted > 0, "memory was never short"


def test_an_undisturbed_life_finishes_everything_by_hand_over() -> None:
    """Guards the tests above against a world in which nothing works, and needless recovery."""
    router = live([])
    assert all(open_.state == "finished" for open_ in router.requests)
    decode = router.counters[WorkerId("decode-0")]
    assert decode.transfers_ok == len(PROMPTS)
    assert decode.late_messages == 0
    for counters in router.counters.values():
        assert counters.transfers_failed == counters.failed == counters.leases_expired == 0
