"""How a split request starts, runs and ends; both legs live and die together."""

import msgspec
import pytest

from services.router.effects import SendWorker
from services.router.events import GatewayMessage, WorkerExited, WorkerMessage
from shared.messages.gateway_router import CancelRequest, Ended, Generate, Tokens
from shared.messages.request import TokenLogprob
from shared.messages.router_worker import (
    CancelWork,
    Expect,
    NewSource,
    Prefill,
    Prefilled,
    Run,
    TokenOut,
    WorkerBye,
)
from tests.unit.router_world import SplitWorld, World, make_request


def test_prefill_and_expect_leave_in_the_same_step_and_name_each_other() -> None:
    world = SplitWorld()
    prefill, expect = world.start()
    assert prefill.decode_worker == "decode-0"
    assert expect.source.transfer == prefill.dispatch
    assert (expect.source.worker, expect.source.incarnation) == ("prefill-0", 1)
    assert prefill.request == expect.request
    assert world.decisions() == {"split": 1}


def test_a_split_request_from_first_to_last_token() -> None:
    world = SplitWorld()
    prefill, expect = world.start(max_tokens=3)
    world.now += 0.1
    world.prefilled(world.prefills[0], prefill.dispatch, 0, 50, cached=32)
    assert [item.token for item in world.one(world.gate, Tokens).items] == [50]
    world.tokens(world.decodes[0], expect.dispatch, 0, 50, 51)
    assert [item.index for item in world.one(world.gate, Tokens).items] == [1]
    world.finished(world.decodes[0], expect.dispatch, TokenOut(expect.dispatch, 2, 52), cached=99)
    kinds = [type(message) for message in world.to(world.gate)]
    assert kinds == [Tokens, Ended], "the last token must not come after the end"
    ended = world.one(world.gate, Ended)
    assert (ended.reason, ended.error, ended.num_tokens) == ("length", None, 3)
    timeline = ended.timeline
    assert timeline.split and timeline.reason == "split" and timeline.retries == 0
    assert (timeline.prefill_worker, timeline.decode_worker) == ("prefill-0", "decode-0")
    assert timeline.prefill.started == 1.0 and timeline.decode.finished == 2.0
    assert timeline.received == timeline.dispatched
    world.idle()


def test_79_cached_tokens_are_those_of_the_first_prefill() -> None:
    """A retry hits the cache its predecessor filled; the client must not see that."""
    world = SplitWorld(decodes=2)
    prefill, _ = world.start()
    world.prefilled(world.prefills[0], prefill.dispatch, 0, 50, cached=16)
    world.handle(WorkerExited(world.decodes[0]))
    again = world.one(world.prefills[0], Prefill)
    expect = world.one(world.decodes[1], Expect)
    world.prefilled(world.prefills[0], again.dispatch, 1, 51, cached=96)
    world.finished(world.decodes[1], expect.dispatch, cached=96)
    assert world.one(world.gate, Ended).num_cached_tokens == 16


def test_77_prompt_logprobs_are_passed_on_once() -> None:
    from shared.messages.gateway_router import PromptLogprobs
    from shared.messages.request import PhaseTimes

    world = SplitWorld()
    plain = make_request("r", [1, 2, 3], force_split=True)
    scored = msgspec.structs.replace(plain.sampling, prompt_logprobs=0)
    request = msgspec.structs.replace(plain, sampling=scored)
    world.handle(GatewayMessage(world.gate, Generate(request=request)))
    prefill = world.one(world.prefills[0], Prefill)
    logprobs = (TokenLogprob(-0.5), TokenLogprob(-0.25))
    done = Prefilled(
        dispatch=prefill.dispatch,
        num_cached_tokens=0,
        times=PhaseTimes(),
        prompt_logprobs=logprobs,
    )
    token = TokenOut(prefill.dispatch, 0, 50)
    world.step(world.prefills[0], tokens=(token,), prefilled=(done,))
    assert world.one(world.gate, PromptLogprobs).items == logprobs
    world.step(world.prefills[0], prefilled=(done,))
    assert not world.to(world.gate, PromptLogprobs)


def test_a_prefill_that_ends_the_request_cancels_decode() -> None:
    world = SplitWorld()
    prefill, expect = world.start(max_tokens=1)
    world.finished(world.prefills[0], prefill.dispatch, TokenOut(prefill.dispatch, 0, 9))
    assert world.one(world.decodes[0], CancelWork).dispatch == expect.dispatch
    assert not world.to(world.prefills[0])
    assert world.one(world.gate, Ended).num_tokens == 1
    world.idle()


def test_6_a_failing_prefill_cancels_its_decode_in_the_same_step() -> None:
    """The decode slot of a failed prefill must not stay pinned until a time-out."""
    world = SplitWorld()
    prefill, expect = world.start()
    world.failed(world.prefills[0], prefill.dispatch, "invalid_request", retryable=False)
    assert world.one(world.decodes[0], CancelWork).dispatch == expect.dispatch
    assert world.one(world.gate, Ended).error.code == "invalid_request"
    world.idle()


def test_7_a_failing_decode_cancels_its_prefill_in_the_same_step() -> None:
    """The prefill must not keep computing for a decode that is gone."""
    world = SplitWorld()
    prefill, _ = world.start()
    world.handle(WorkerExited(world.decodes[0]))
    assert world.one(world.prefills[0], CancelWork).dispatch == prefill.dispatch
    assert not world.state.legs.by_id and len(world.state.requests.queue) == 1


def test_20_a_rejection_by_decode_frees_the_prefill_at_once() -> None:
    world = SplitWorld()
    prefill, expect = world.start()
    world.prefilled(world.prefills[0], prefill.dispatch, 0, 50)
    world.failed(world.decodes[0], expect.dispatch, "invalid_request", retryable=False)
    assert world.one(world.prefills[0], CancelWork).dispatch == prefill.dispatch
    world.idle()


@pytest.mark.parametrize("full", ["prefill", "decode"])
def test_8_a_pair_is_admitted_as_a_whole_or_waits(full: str) -> None:
    """One leg without the other is a dead request that looks alive."""
    world = World()
    gate = world.gateway()
    prefill = world.worker("prefill-0", sequences=1 if full == "prefill" else 9)
    decode = world.worker("decode-0", sequences=1 if full == "decode" else 9)
    world.generate(gate, "a")
    first, expect = world.one(prefill, Prefill), world.one(decode, Expect)
    world.generate(gate, "b")
    assert not [e for e in world.effects if isinstance(e, SendWorker)]
    world.prefilled(prefill, first.dispatch, 0, 1)
    world.finished(decode, expect.dispatch)
    assert world.one(prefill, Prefill).request.request_id == "b"
    assert world.one(decode, Expect).request.request_id == "b"


def test_the_source_is_free_once_decode_has_a_token_of_its_own() -> None:
    """A held prefill counts against its worker only while decode may still pull."""
    world = SplitWorld()
    prefill, expect = world.start()
    world.prefilled(world.prefills[0], prefill.dispatch, 0, 50)
    worker = world.state.fleet.by_peer[world.prefills[0]]
    assert worker.committed_blocks > 0 and worker.pending_tokens == 0
    world.tokens(world.decodes[0], expect.dispatch, 0, 50)
    assert worker.committed_blocks == 0 and not world.to(world.prefills[0])


def test_decode_may_overtake_the_word_of_prefill() -> None:
    """Two sockets race: the token of prefill may arrive after decode's repetition of it."""
    world = SplitWorld()
    prefill, expect = world.start()
    world.tokens(world.decodes[0], expect.dispatch, 0, 50)
    assert len(world.one(world.gate, Tokens).items) == 1
    world.prefilled(world.prefills[0], prefill.dispatch, 0, 50, cached=48)
    assert not world.to(world.gate, Tokens)
    world.finished(world.decodes[0], expect.dispatch)
    assert world.one(world.gate, Ended).num_cached_tokens == 48
    assert world.state.counters.late_messages == 0


@pytest.mark.parametrize("phase", ["prefilling", "receiving", "decoding"])
def test_28_a_cancel_reaches_every_worker_in_every_phase(phase: str) -> None:
    """A client that left must not keep a prefill busy."""
    world = SplitWorld()
    prefill, expect = world.start()
    if phase != "prefilling":
        world.prefilled(world.prefills[0], prefill.dispatch, 0, 50)
    if phase == "decoding":
        world.tokens(world.decodes[0], expect.dispatch, 0, 50)
    world.handle(GatewayMessage(world.gate, CancelRequest(request_id=prefill.request.request_id)))
    assert world.one(world.decodes[0], CancelWork).dispatch == expect.dispatch
    cancelled = [message.dispatch for message in world.to(world.prefills[0], CancelWork)]
    assert cancelled == ([] if phase == "decoding" else [prefill.dispatch])
    ended = world.one(world.gate, Ended)
    assert ended.reason is None and ended.error is None
    world.idle()


def test_28_a_cancel_while_queued_or_colocated() -> None:
    world = World(deployment_type="colocated")
    gate, mixed = world.gateway(), world.worker("mixed-0", sequences=1)
    world.generate(gate, "a")
    run = world.one(mixed, Run)
    world.generate(gate, "b")
    for name in ("b", "a"):
        request_id = make_request(name).request_id
        world.handle(GatewayMessage(gate, CancelRequest(request_id=request_id)))
        assert world.one(gate, Ended).request_id == name
    assert world.one(mixed, CancelWork).dispatch == run.dispatch
    world.idle()


def test_1_decode_goes_on_with_another_prefill_when_its_own_dies() -> None:
    """Decode needs neither a restart nor a new reservation."""
    world = SplitWorld(prefills=2)
    prefill, expect = world.start()
    world.handle(WorkerExited(world.prefills[0]))
    again = world.one(world.prefills[1], Prefill)
    source = world.one(world.decodes[0], NewSource)
    assert not world.to(world.decodes[0], CancelWork, Expect)
    assert source.dispatch == expect.dispatch and source.source.transfer == again.dispatch
    assert again.dispatch != prefill.dispatch and again.request.prompt_ids
    assert world.health(world.decodes[0]) == "ready"
    world.generate(world.gate, "next")
    assert world.to(world.prefills[1], Prefill) and world.to(world.decodes[0], Expect)


def test_2_decode_stays_ready_without_any_prefill() -> None:
    world = SplitWorld()
    world.start()
    world.handle(WorkerExited(world.prefills[0]))
    assert world.health(world.decodes[0]) == "ready"


def test_1_a_prefill_that_dies_after_its_token_was_seen_brings_a_new_pair() -> None:
    """Decode would otherwise go on from a token that another prefill may sample differently."""
    world = SplitWorld(prefills=2)
    prefill, expect = world.start()
    world.prefilled(world.prefills[0], prefill.dispatch, 0, 50)
    world.handle(WorkerExited(world.prefills[0]))
    assert world.one(world.decodes[0], CancelWork).dispatch == expect.dispatch
    assert world.one(world.prefills[1], Prefill).request.output_ids == (50,)
    assert world.one(world.decodes[0], Expect).request.output_ids == (50,)


def test_a_lost_transfer_takes_another_prefill() -> None:
    world = SplitWorld(prefills=2)
    prefill, expect = world.start()
    world.lost(world.decodes[0], expect.dispatch, prefill.dispatch)
    assert world.one(world.prefills[0], CancelWork).dispatch == prefill.dispatch
    again = world.one(world.prefills[1], Prefill)
    assert world.one(world.decodes[0], NewSource).source.transfer == again.dispatch
    assert world.state.counters.retries == 1


def test_word_of_a_former_source_is_ignored() -> None:
    world = SplitWorld(prefills=2)
    prefill, expect = world.start()
    world.lost(world.decodes[0], expect.dispatch, prefill.dispatch)
    world.lost(world.decodes[0], expect.dispatch, prefill.dispatch)
    assert not [e for e in world.effects if isinstance(e, SendWorker)]
    assert world.state.counters.late_messages == 1


def test_a_lost_transfer_runs_on_decode_when_no_prefill_is_left() -> None:
    world = SplitWorld()
    _, expect = world.start()
    world.handle(WorkerExited(world.prefills[0]))
    run = world.one(world.decodes[0], Run)
    assert run.dispatch == expect.dispatch, "it takes the place of the waiting Expect"
    world.tokens(world.decodes[0], run.dispatch, 0, 50)
    assert len(world.one(world.gate, Tokens).items) == 1
    assert world.decisions() == {"split": 1, "no_prefill_local": 1}
    world.finished(world.decodes[0], run.dispatch)
    timeline = world.one(world.gate, Ended).timeline
    assert not timeline.split and timeline.reason == "no_prefill_local"
    assert timeline.prefill_worker is None
    world.idle()


def test_34_a_transfer_refused_for_the_request_itself_ends_it() -> None:
    """Prefill found the request invalid: decode must not wait or serve something else."""
    from shared.errors import ErrorPayload
    from shared.messages.router_worker import TransferLost

    world = SplitWorld(prefills=2)
    _, expect = world.start()
    error = ErrorPayload(code="invalid_request", message="no")
    message = TransferLost(dispatch=expect.dispatch, transfer=expect.source.transfer, error=error)
    world.handle(WorkerMessage(world.decodes[0], message))
    assert world.one(world.gate, Ended).error == error
    assert world.to(world.decodes[0], CancelWork) and world.to(world.prefills[0], CancelWork)
    world.idle()


def test_a_lost_decode_resumes_with_the_tokens_so_far() -> None:
    world = SplitWorld(decodes=2)
    prefill, expect = world.start()
    world.prefilled(world.prefills[0], prefill.dispatch, 0, 50)
    world.tokens(world.decodes[0], expect.dispatch, 0, 50, 51, 52)
    world.handle(WorkerExited(world.decodes[0]))
    assert not world.to(world.gate), "the client sees nothing"
    again = world.one(world.decodes[1], Expect)
    assert again.request.output_ids == (50, 51, 52)
    prefill_again = world.one(world.prefills[0], Prefill)
    world.prefilled(world.prefills[0], prefill_again.dispatch, 3, 53)
    assert [item.index for item in world.one(world.gate, Tokens).items] == [3]
    world.finished(world.decodes[1], again.dispatch)
    timeline = world.one(world.gate, Ended).timeline
    assert timeline.retries == 1 and timeline.decode_worker == "decode-1"


def test_a_replacement_that_is_not_needed_after_all_is_cancelled() -> None:
    """Decode had everything when its prefill died, and never read the new source."""
    world = SplitWorld(prefills=2)
    _, expect = world.start()
    world.handle(WorkerExited(world.prefills[0]))
    again = world.one(world.prefills[1], Prefill)
    world.tokens(world.decodes[0], expect.dispatch, 0, 50)
    assert world.one(world.prefills[1], CancelWork).dispatch == again.dispatch


def test_held_kv_of_a_prefill_that_left_in_order_is_not_computed_again() -> None:
    world = SplitWorld(prefills=2)
    prefill, expect = world.start()
    world.prefilled(world.prefills[0], prefill.dispatch, 0, 50)
    world.handle(WorkerMessage(world.prefills[0], WorkerBye()))
    assert not [e for e in world.effects if isinstance(e, SendWorker)]
    world.lost(world.decodes[0], expect.dispatch, prefill.dispatch)
    assert world.one(world.prefills[1], Prefill).request.output_ids == (50,)
