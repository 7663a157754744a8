"""Workers that say what cannot be: counted, and the harm ends with the request they say it of."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.events import WorkerMessage
from services.router.records import Leg
from shared.ids import DispatchId
from shared.messages.gateway_router import Ended
from shared.messages.request import FinishReason, PhaseTimes, TokenLogprob
from shared.messages.router_worker import (
    CancelWork,
    Prefilled,
    Run,
    SequenceFinished,
    StepOutput,
    TokenOut,
)
from tests.unit.router_fleet_sim import VOCABULARY, FleetSim, token_of
from tests.unit.router_world import World

NAN = float("nan")
HONEST, LIAR = "mixed-0", "mixed-1"
LIES = ("gap", "vocabulary", "negative", "nan", "top", "silent", "early", "stop", "scores", "over")


def lie(leg: Leg, kind: str) -> dict[str, Any]:
    """Return the fields of a step that says something impossible of a dispatch."""
    request, dispatch = leg.open, leg.dispatch
    index, limit = request.num_output, request.limit

    def token(at: int = index, value: int | None = None, **score: Any) -> TokenOut:
        true = token_of(request.request.request_id, at)
        return TokenOut(dispatch, at, true if value is None else value, **score)

    def finished(reason: FinishReason = "length", **fields: Any) -> SequenceFinished:
        return SequenceFinished(
            dispatch=dispatch, reason=reason, num_cached_tokens=0, times=PhaseTimes(), **fields
        )

    lies: dict[str, dict[str, Any]] = {
        "gap": {"tokens": (token(index + 1),)},
        "vocabulary": {"tokens": (token(value=VOCABULARY),)},
        "negative": {"tokens": (token(value=-1),)},
        "nan": {"tokens": (token(logprob=TokenLogprob(NAN)),)},
        "top": {"tokens": (token(logprob=TokenLogprob(-1.0, ((VOCABULARY, -1.0),))),)},
        "silent": {"prefilled": (), "finished": (finished("stop"),)},
        "early": {"finished": (finished(),)},
        "stop": {"finished": (finished("stop"),)},
        "over": {"tokens": tuple(token(i) for i in range(index, limit + 1))},
        "scores": {
            "tokens": tuple(token(i) for i in range(index, limit)),
            "finished": (finished(prompt_logprobs=(TokenLogprob(-1.0),)),),
        },
    }
    return lies[kind]


def others(sim: FleetSim, victim: Leg | None) -> dict[str, object]:
    """What the router knows of running requests, all but the victim's."""
    return {
        name: (request.phase, len(request.items), request.retries, request.prefill, request.decode)
        for name, request in sim.world.state.requests.open.items()
        if request.phase != "queued" and (victim is None or request is not victim.open)
    }


ACTIONS = st.sampled_from(["generate", "take", "work", "deliver", "lie", "lie", "foreign"])


@given(steps=st.lists(st.tuples(ACTIONS, st.integers(0, 10_000)), max_size=80))
@settings(max_examples=200, deadline=None)
def test_a_lying_worker_harms_nothing_but_what_it_lies_about(
    steps: list[tuple[str, int]],
) -> None:
    """No lie reaches a gateway (``FleetSim`` compares tokens), every request ends once."""
    sim = FleetSim(deployment_type="colocated")
    sim.join(HONEST)
    sim.join(LIAR)
    counters = sim.world.state.counters
    for action, number in steps:
        worker = sim.workers[(HONEST, LIAR)[number % 2]]
        if action == "generate":
            sim.generate(f"r{number % 20}", 10, 2 + number % 5, 0)
        elif action == "take":
            worker.take()
        elif action == "work":
            worker.work(number)
        elif action == "deliver":
            sim.deliver(worker)
        else:
            told, before = counters.violations, dict[str, object]()
            liar = sim.workers[LIAR].peer
            mine = action == "lie"
            legs = sim.world.state.legs.by_id.values()
            legs_there = [leg for leg in legs if (leg.worker.peer == liar) is mine]
            if not legs_there:
                continue
            leg = legs_there[number % len(legs_there)]
            before = others(sim, leg if mine else None)
            fields = lie(leg, LIES[number % len(LIES)])
            step = StepOutput(step=sim.workers[LIAR].step, **fields)
            sim.absorb(sim.world.handle(WorkerMessage(liar, step)))
            assert counters.violations > told
            after = others(sim, leg if mine else None)
            assert before.items() <= after.items(), "another request was touched"
    sim.settle([HONEST, LIAR])


@pytest.mark.parametrize("kind", LIES)
def test_what_cannot_be_is_named_and_done_again_elsewhere(kind: str) -> None:
    world = World(deployment_type="colocated")
    gate = world.gateway()
    liar = world.worker("mixed-0", vocabulary=VOCABULARY)
    world.generate(gate, "r", 20, max_tokens=4)
    run = world.one(liar, Run)
    honest = world.worker("mixed-1", vocabulary=VOCABULARY)
    effects = world.step(liar, **lie(world.state.legs.by_id[run.dispatch], kind))
    assert world.one(liar, CancelWork).dispatch == run.dispatch
    assert any("mixed-0" in getattr(effect, "text", "") for effect in effects)
    assert world.state.counters.violations == 1
    if kind not in ("over", "scores"):  # there the output was whole before the lie
        assert not world.to(gate, Ended)
        world.finished(honest, world.one(honest, Run).dispatch)
    assert world.one(gate, Ended).reason == "length"
    world.idle()


def test_a_prefill_that_ends_without_its_token_is_not_believed() -> None:
    world = World()
    gate, prefill = world.gateway(), world.worker("prefill-0")
    world.worker("decode-0")
    world.generate(gate, "r", 100)
    (dispatch,) = [leg.dispatch for leg in world.state.legs.by_id.values() if leg.kind == "prefill"]
    done = Prefilled(dispatch=dispatch, num_cached_tokens=0, times=PhaseTimes())
    world.step(prefill, prefilled=(done,))
    assert world.state.counters.violations == 1


def test_output_for_what_never_was_is_late_and_no_violation() -> None:
    """Nobody can tell it from a dispatch that has ended."""
    world = World()
    decode = world.worker("decode-0")
    world.tokens(decode, DispatchId(99), 0, 5)
    assert world.state.counters.late_messages == 1
    assert world.state.counters.violations == 0
