"""Split or not, and where: every decision has a reason and a counter."""

import pytest

from services.router.events import Tick, WorkerExited
from services.router.prefix_index import PrefixIndex
from shared.ids import BlockHash
from shared.messages.gateway_router import Ended
from shared.messages.router_worker import Expect, Prefill, Run
from tests.unit.router_world import SplitWorld, World


def test_colocated_runs_on_mixed_workers_only() -> None:
    world = World(deployment_type="colocated")
    gate, mixed = world.gateway(), world.worker("mixed-0")
    world.worker("prefill-0")
    world.worker("decode-0")
    world.generate(gate, "r", 500, force_split=True)
    assert world.to(mixed, Run) and world.decisions() == {"colocated": 1}


@pytest.mark.parametrize(
    ("length", "forced", "reason"),
    [(63, False, "short_prompt"), (64, False, "split"), (8, True, "split")],
)
def test_the_threshold_decides_unless_a_split_is_forced(
    length: int, forced: bool, reason: str
) -> None:
    world = SplitWorld(split_threshold=64)
    world.generate(world.gate, "r", length, force_split=forced)
    assert world.decisions() == {reason: 1}
    assert bool(world.to(world.prefills[0], Prefill)) == (reason == "split")
    assert bool(world.to(world.decodes[0], Run)) == (reason != "split")


def test_decode_computes_prompts_itself_once_prefill_is_far_behind() -> None:
    """All prompts queue for one process while the other has time: half the machine idles."""
    world = SplitWorld(spill_tokens=1000)
    alone = []
    for number in range(6):
        world.generate(world.gate, f"r{number}", 500)
        alone += world.to(world.decodes[0], Run)
    assert world.decisions() == {"split": 5, "prefill_backlog": 1}
    assert len(alone) == 1


def test_decode_computes_no_prompts_while_it_has_all_it_can_do() -> None:
    """Both workers are busy: prompts on decode would only stretch its streams."""
    for length, spilled in ((800, 1), (160, 0)):
        world = SplitWorld(spill_tokens=1000)
        for number in range(1600 // length):  # as many tokens, of few sequences or of many
            world.generate(world.gate, f"r{number}", length, force_split=True)
        world.generate(world.gate, "last", 100)
        assert world.decisions().get("prefill_backlog", 0) == spilled


def test_nothing_spills_where_that_is_forbidden_or_a_split_is_forced() -> None:
    """Streams on decode would be delayed by chunks that somebody ruled out."""
    for config, forced in (({"spill_tokens": None}, False), ({"spill_tokens": 1000}, True)):
        world = SplitWorld(**config)
        for number in range(5):
            world.generate(world.gate, f"r{number}", 500, force_split=forced)
        assert "prefill_backlog" not in world.decisions()


def test_a_prompt_that_decode_has_cached_is_not_split() -> None:
    """The second turn of a chat costs decode a few tokens and prefill a whole hand-over."""
    world = SplitWorld()
    prompt = list(range(160))
    _, expect = world.start("first", prompt)
    world.tokens(world.decodes[0], expect.dispatch, 0, 7)
    world.finished(world.decodes[0], expect.dispatch)
    world.generate(world.gate, "second", [*prompt, 1, 2, 3])
    assert world.to(world.decodes[0], Run)
    assert world.decisions() == {"split": 1, "cached_prefix": 1}


def test_what_decode_only_expects_is_not_cached_there() -> None:
    world = SplitWorld()
    prompt = list(range(160))
    world.start("first", prompt)
    world.generate(world.gate, "second", prompt)
    assert world.decisions() == {"split": 2}


def test_the_cache_of_one_tenant_attracts_no_other() -> None:
    world = SplitWorld()
    prompt = list(range(160))
    _, expect = world.start("first", prompt, tenant="a")
    world.tokens(world.decodes[0], expect.dispatch, 0, 7)
    world.generate(world.gate, "second", prompt, tenant="b")
    assert world.decisions() == {"split": 2}


def test_16_without_prefill_local_policy_runs_on_decode_and_says_so() -> None:
    world = SplitWorld(prefills=0, on_no_prefill="local")
    world.generate(world.gate, "r")
    assert world.to(world.decodes[0], Run)
    assert world.decisions() == {"no_prefill_local": 1}


def test_16_without_prefill_fail_policy_fails_at_once() -> None:
    world = SplitWorld(prefills=0, on_no_prefill="fail")
    world.generate(world.gate, "r")
    error = world.one(world.gate, Ended).error
    assert error.code == "no_worker" and error.retryable
    assert world.decisions() == {"no_prefill_fail": 1}
    world.idle()


def test_16_without_prefill_wait_policy_waits_for_one() -> None:
    world = SplitWorld(prefills=0, on_no_prefill="wait")
    world.generate(world.gate, "r")
    world.wait(1.0, *world.decodes)
    assert not world.to(world.decodes[0])
    assert world.decisions() == {"no_prefill_wait": 1}
    world.generate(world.gate, "short", 8)
    assert world.to(world.decodes[0], Run), "a short prompt need not wait behind it"
    prefill = world.worker("prefill-0")
    assert world.to(prefill, Prefill) and world.to(world.decodes[0], Expect)


@pytest.mark.parametrize(("policy", "code"), [("fail", "no_worker"), ("wait", None)])
def test_16_the_policy_holds_for_a_prefill_that_dies_too(policy: str, code: str | None) -> None:
    world = SplitWorld(on_no_prefill=policy)
    world.start()
    world.handle(WorkerExited(world.prefills[0]))
    assert not world.to(world.decodes[0], Run)
    assert [ended.error.code for ended in world.to(world.gate, Ended)] == ([code] if code else [])


def test_16_right_after_the_start_prefill_may_still_be_on_its_way() -> None:
    """A restarted router must not run everything on the worker that said hello first."""
    world = World(settled=False, on_no_prefill="local")
    gate, decode = world.gateway(), world.worker("decode-0")
    world.generate(gate, "r")
    assert not world.to(decode)
    prefill = world.worker("prefill-0")
    assert world.to(prefill, Prefill) and world.to(decode, Expect)


def test_16_a_fleet_that_has_settled_without_prefill_follows_the_policy() -> None:
    world = World(settled=False, on_no_prefill="local")
    gate, decode = world.gateway(), world.worker("decode-0")
    world.generate(gate, "r")
    world.wait(2.5, decode)
    assert world.to(decode, Run)


def test_prefills_share_the_load_by_tokens() -> None:
    world = SplitWorld(prefills=2)
    world.generate(world.gate, "big", 1000)
    assert world.to(world.prefills[0], Prefill)
    for i in range(5):
        world.generate(world.gate, f"small-{i}", 150)
        assert world.to(world.prefills[1], Prefill)
    world.generate(world.gate, "more", 600)
    assert world.to(world.prefills[1], Prefill)
    world.generate(world.gate, "last", 100)
    assert world.to(world.prefills[0], Prefill)


def test_a_cached_prefix_attracts_until_the_queue_is_longer_than_it_saves() -> None:
    world = SplitWorld(prefills=2)
    shared = list(range(320))
    prefill, _ = world.start("first", [*shared, 1])
    world.prefilled(world.prefills[0], prefill.dispatch, 0, 9)
    world.generate(world.gate, "other", 200)
    holder, busy = world.prefills[0], world.prefills[1]
    assert world.to(busy, Prefill)
    world.generate(world.gate, "second", [*shared, 2])
    assert world.to(holder, Prefill)
    world.generate(world.gate, "load", 3000)
    target = holder if world.to(holder, Prefill) else busy
    world.generate(world.gate, "third", [*shared, 3])
    assert not world.to(target, Prefill), "the guard against overload wins"


def test_52_decode_is_chosen_by_what_its_requests_will_need() -> None:
    """Two short prompts with long answers weigh more than one long prompt without."""
    world = SplitWorld(decodes=2)
    world.generate(world.gate, "long-answer", 100, max_tokens=900)
    assert world.to(world.decodes[0], Expect)
    world.generate(world.gate, "a", 400, max_tokens=4)
    assert world.to(world.decodes[1], Expect)
    world.generate(world.gate, "b", 100, max_tokens=4)
    assert world.to(world.decodes[1], Expect)


def test_52_admission_keeps_room_for_the_growth_of_what_runs() -> None:
    world = World()
    gate = world.gateway()
    prefill, decode = world.worker("prefill-0"), world.worker("decode-0", blocks=40)
    world.generate(gate, "a", 160, max_tokens=160)
    assert world.to(decode, Expect)
    world.generate(gate, "b", 160, max_tokens=320)
    assert not world.to(prefill) and not world.to(decode)


def test_52_what_grows_beyond_the_prediction_is_charged() -> None:
    world = World()
    gate = world.gateway()
    prefill, decode = world.worker("prefill-0"), world.worker("decode-0", blocks=200)
    world.generate(gate, "a", 160, max_tokens=5000)
    expect = world.one(decode, Expect)
    worker = world.state.fleet.by_peer[decode]
    assert worker.committed_blocks == (160 + 1024) // 16
    world.tokens(decode, expect.dispatch, 0, *range(1500))
    world.now += 1.0
    world.handle(Tick())
    assert worker.committed_blocks == (1660 + 1 + 15) // 16
    assert prefill in world.state.fleet.by_peer


def test_a_request_larger_than_any_pool_runs_alone() -> None:
    """It must not wait for room that never comes; the worker says what is wrong with it."""
    world = World()
    gate, _ = world.gateway(), world.worker("prefill-0", blocks=4)
    decode = world.worker("decode-0", blocks=4)
    world.generate(gate, "a", 160)
    assert world.to(decode, Expect)


def test_a_prompt_that_fits_decode_only_runs_there() -> None:
    world = World()
    gate = world.gateway()
    prefill, decode = world.worker("prefill-0", blocks=4), world.worker("decode-0")
    world.generate(gate, "a", 160)
    assert world.to(decode, Run) and not world.to(prefill)
    assert world.decisions() == {"prefill_too_small": 1}


def test_30_the_prefix_index_is_bounded_and_forgets_tails_first() -> None:
    """A router's memory must not grow with the number of prompts it has seen."""
    index = PrefixIndex(4)
    chain = [BlockHash(bytes([i]) * 16) for i in range(6)]
    index.add(chain[:4])
    index.add([chain[0], chain[5]])
    assert len(index) == 4
    assert index.match(chain[:4]) == 3
    for i in range(1000):
        index.add([BlockHash(i.to_bytes(16, "big"))])
    assert len(index) == 4
