"""Which tokens run when, who gets blocks, and how sequences end."""

import msgspec
import pytest

from shared.engine.batch import OpenSequence, Sampled, SequenceInput, StepInput, StepResult
from shared.errors import ErrorPayload
from shared.messages.request import TokenLogprob
from shared.messages.router_worker import StepOutput, TokenOut
from shared.worker.effects import RunStep, ToRouter
from shared.worker.events import StepDone, StepFailed
from tests.unit.worker_bench import Bench, error, request


def test_a_run_computes_its_prompt_and_decodes_to_the_end() -> None:
    """Guards the whole simple path, effect by effect."""
    bench = Bench()
    work = request((9, 8, 7), max_tokens=2)
    assert bench.run(1, work) == [
        RunStep(
            1,
            StepInput(
                opened=(OpenSequence(1, work.sampling, (9, 8, 7)),),
                sequences=(SequenceInput(1, (9, 8, 7), 0, (0,), True),),
            ),
            announce=(),
        )
    ]
    bench.now = 2.0
    bench.running = None
    first = bench.event(StepDone(1, StepResult(sampled=(Sampled(1, 50, TokenLogprob(-0.5)),)), 1.5))
    assert first == [
        RunStep(2, StepInput(sequences=(SequenceInput(1, (50,), 3, (0,), True),)), announce=()),
        ToRouter(StepOutput(step=2, tokens=(TokenOut(1, 0, 50, TokenLogprob(-0.5)),))),  # type: ignore[arg-type]
    ]
    bench.step(51)
    assert bench.output().tokens == (TokenOut(1, 1, 51),)  # type: ignore[arg-type]
    finished = bench.finished()
    assert (finished.reason, finished.num_cached_tokens) == ("length", 0)
    assert (finished.times.accepted, finished.times.started) == (0.0, 0.0)
    assert (finished.times.prefilled, finished.times.finished) == (1.5, 2.0)
    assert bench.empty() and bench.running is None


def test_an_ended_sequence_is_closed_in_the_engine_with_the_next_step() -> None:
    """Guards sampler state (penalties, grammars) that is never given back."""
    bench = Bench()
    bench.run(1, request(3, max_tokens=1))
    bench.step()
    bench.run(2, request(3, max_tokens=1))
    assert bench.running is not None
    assert bench.running.batch.closed == (1,)


def test_decodes_go_first_and_prompt_chunks_fill_the_budget() -> None:
    """Guards running streams against stalling behind a long prompt."""
    bench = Bench(blocks=32)
    bench.run(1, request(3, max_tokens=9))
    bench.run(2, request(20, max_tokens=9))
    assert bench.work() == [(0, 3, True)]
    bench.step()
    assert bench.work() == [(3, 1, True), (0, 7, False)]
    bench.step()
    assert bench.work() == [(4, 1, True), (7, 7, False)]
    bench.step()
    assert bench.work() == [(5, 1, True), (14, 6, True)]
    bench.step()
    assert bench.work() == [(6, 1, True), (20, 1, True)]


def test_admission_keeps_blocks_for_the_growth_of_what_runs() -> None:
    """Guards against filling the pool with prompts that then all stall (scenario 52)."""
    bench = Bench(blocks=8)
    bench.run(1, request(8, max_tokens=8))
    bench.run(2, request(tuple(range(8)), max_tokens=8))
    bench.step()
    load = bench.state.load()
    assert (load.running, load.waiting) == (2, 0)
    bench.run(3, request(tuple(range(40, 48)), max_tokens=8))
    while bench.state.load().waiting:
        bench.step()
    assert [f.dispatch for f in bench.output().finished] == [1], "its turn comes with an end"
    assert bench.counters().preemptions == 0


def test_the_youngest_is_preempted_and_continues_its_stream_later() -> None:
    """Guards against deadlock, crash or a broken stream when blocks run out (scenario 54)."""
    bench = Bench(blocks=8)
    bench.run(1, request(8, max_tokens=16))
    bench.run(2, request(tuple(range(8)), max_tokens=16))
    seen: dict[int, list[tuple[int, int]]] = {1: [], 2: []}
    ended: list[int] = []
    opened: list[int] = []
    while bench.running is not None:
        opened += [o.key for o in bench.running.batch.opened]
        bench.step(token=50 + bench.running.step)
        for token in bench.output().tokens:
            seen[token.dispatch].append((token.index, token.token))
        ended += [f.dispatch for f in bench.output().finished]
    assert ended == [1, 2]
    assert [i for i, _ in seen[1]] == list(range(16))
    assert [i for i, _ in seen[2]] == list(range(16))
    assert opened == [1, 2], "preemption must not reset the sampler"
    assert bench.counters().preemptions == 1
    assert bench.empty()


def test_a_prompt_that_cannot_fit_is_refused_by_name_and_takes_nothing() -> None:
    bench = Bench(blocks=4)
    bench.run(1, request(16))
    assert bench.failed().error.code == "invalid_request"
    assert bench.failed().error.param == "prompt"
    assert "4 blocks of 4 tokens" in bench.failed().error.message
    assert bench.empty() and bench.state.idle


def test_a_prompt_refused_for_memory_says_so_although_the_model_length_follows_from_it() -> None:
    """Guards a sentence that sends the operator to the wrong setting."""
    bench = Bench(blocks=4, max_model_len=16)
    bench.run(1, request(20))
    assert "KV memory" in bench.failed().error.message


def test_a_prompt_that_never_fits_names_the_setting_and_how_much_of_it_is_enough() -> None:
    """Guards a refusal whose reader has to find out that `kv_memory` is what is too small."""
    bench = Bench(blocks=4)
    bench.run(1, request(33))
    assert "34 tokens of prompt and answer exceed" in bench.failed().error.message
    assert "raise `kv_memory`" in bench.failed().error.message
    assert "3 times as much is enough" in bench.failed().error.message
    enough = Bench(blocks=3 * 4)
    enough.run(1, request(33))
    assert not enough.state.idle


def test_a_sequence_that_outgrows_the_whole_pool_fails_by_name() -> None:
    """Guards against waiting for ever for blocks that do not exist."""
    bench = Bench(blocks=3)
    bench.run(1, request(8, max_tokens=30))
    for _ in range(5):
        bench.step()
    assert bench.failed().error.param == "max_tokens"
    assert bench.empty() and bench.state.idle


@pytest.mark.parametrize(
    ("work", "param"),
    [
        (request(()), "prompt"),
        (request(64), "prompt"),
        (request((5, 1000)), "prompt"),
        (request((5, -1)), "prompt"),
        (request(3, max_tokens=0), "max_tokens"),
    ],
)
def test_impossible_requests_are_refused_with_the_fields_name(work: object, param: str) -> None:
    bench = Bench(blocks=64)
    bench.run(1, work)  # type: ignore[arg-type]
    assert (bench.failed().error.code, bench.failed().error.param) == ("invalid_request", param)
    assert bench.state.idle


def test_a_prompt_found_in_the_cache_still_computes_its_last_token() -> None:
    """Guards prompts of exactly n blocks: nothing computed would mean nothing sampled (37)."""
    bench = Bench()
    bench.run(1, request(8, max_tokens=1))
    bench.step()
    bench.run(2, request(8, max_tokens=1))
    assert bench.work() == [(4, 4, True)]
    bench.step()
    assert bench.finished().num_cached_tokens == 4


def test_generated_blocks_are_found_by_the_next_turn() -> None:
    bench = Bench()
    bench.run(1, request((1, 2, 3), max_tokens=6))
    bench.steps(6, token=50)
    bench.run(2, request((1, 2, 3, 50, 50, 50, 50, 50, 50), max_tokens=1))
    assert bench.work() == [(8, 1, True)]


def test_another_tenant_finds_nothing_in_the_cache() -> None:
    bench = Bench()
    bench.run(1, request(8, max_tokens=1))
    bench.step()
    bench.run(2, msgspec.structs.replace(request(8, max_tokens=1), tenant="other"))
    assert bench.work() == [(0, 8, True)]


def test_prompt_logprobs_compute_the_whole_prompt_and_add_up_over_chunks() -> None:
    bench = Bench()
    bench.run(1, request(10, max_tokens=1))
    bench.steps(2)
    bench.run(2, request(10, max_tokens=1, prompt_logprobs=0))
    chunks = []
    for count in (8, 1):
        assert bench.running is not None
        (item,) = bench.running.batch.sequences
        chunks.append((item.start, len(item.tokens)))
        sampled = (Sampled(item.key, 50),) if item.sample else ()
        part = tuple(TokenLogprob(-float(item.start + i)) for i in range(count))
        step, bench.running = bench.running.step, None
        bench.event(
            StepDone(step, StepResult(sampled=sampled, prompt_logprobs=((item.key, part),)), 0.0)
        )
    assert chunks == [(0, 8), (8, 2)]
    assert [p.logprob for p in bench.finished().prompt_logprobs] == [-float(i) for i in range(9)]


@pytest.mark.parametrize(
    ("sampling", "prompt", "tokens", "reason"),
    [
        ({"max_tokens": 3}, 4, 3, "length"),
        ({"max_tokens": 30, "stop_token_ids": (50,)}, 4, 1, "stop"),
        ({"max_tokens": 60}, 62, 2, "length"),
    ],
)
def test_a_sequence_ends_at_its_stop_token_its_limit_or_the_models(
    sampling: dict[str, object], prompt: int, tokens: int, reason: str
) -> None:
    bench = Bench(max_batch_tokens=64)
    bench.run(1, request(prompt, **sampling))  # type: ignore[arg-type]
    bench.steps(tokens)
    assert bench.finished().reason == reason
    assert bench.empty()


def test_a_resumed_request_continues_at_its_index() -> None:
    bench = Bench()
    bench.run(1, msgspec.structs.replace(request(3, max_tokens=4), output_ids=(60, 61)))
    assert bench.running is not None
    assert bench.running.batch.opened[0].output_ids == (60, 61)
    assert bench.work() == [(0, 5, True)]
    bench.step()
    assert bench.output().tokens[0].index == 2
    bench.step()
    assert bench.finished().reason == "length"


def test_a_request_resumed_after_its_last_token_only_ends() -> None:
    """Guards a token after the end when only the terminal message was lost."""
    bench = Bench()
    bench.run(1, msgspec.structs.replace(request(3, max_tokens=2), output_ids=(60, 61)))
    assert bench.output().tokens == ()
    assert bench.finished().reason == "length"
    assert bench.state.idle


@pytest.mark.parametrize("moment", ["waiting", "computing", "prompt half done", "decoding"])
def test_a_cancel_at_any_moment_gives_every_block_back(moment: str) -> None:
    """Guards leaks and writes into blocks of others (scenarios 21, 27, 28)."""
    bench = Bench(max_sequences=1)
    if moment == "waiting":
        bench.run(9, request((1, 2), max_tokens=2))
        bench.step()
    bench.run(1, request(20, max_tokens=9))
    bench.steps({"waiting": 0, "computing": 0, "prompt half done": 1, "decoding": 4}[moment])
    bench.cancel(1)
    assert bench.to_router() == []
    if moment == "waiting":
        bench.step()
    else:
        assert bench.pool.stats().active > 0, "the running step still writes to its blocks"
        bench.step()
        assert bench.to_router() == []
    assert bench.empty() and bench.running is None


def test_a_message_for_a_dispatch_that_ended_changes_nothing() -> None:
    """Guards against running twice what was delivered twice (scenario 29)."""
    bench = Bench()
    bench.run(1, request(3, max_tokens=1))
    bench.step()
    assert bench.run(1, request(3, max_tokens=1)) == []
    assert bench.cancel(1) == [] and bench.cancel(77) == []
    assert bench.counters().late_messages == 3


def test_a_request_past_its_time_fails_wherever_it_stands() -> None:
    bench = Bench()
    bench.run(1, msgspec.structs.replace(request(3), ttl=5.0))
    bench.tick(5.0)
    assert bench.failed().error.code == "deadline_exceeded"
    bench.step()
    assert bench.empty()


def test_a_full_table_of_requests_answers_overloaded() -> None:
    bench = Bench(max_open=2)
    for number in (1, 2, 3):
        bench.run(number, request(3))
    assert bench.failed().error.code == "overloaded"
    assert bench.failed().error.retryable


def test_a_nan_fails_its_own_sequence_only_and_its_kv_is_not_reused() -> None:
    bench = Bench(blocks=32)
    bench.run(1, request(3, max_tokens=9))
    bench.run(2, request((4, 5, 6, 7), max_tokens=9))
    bench.step()
    assert bench.running is not None
    step, bench.running = bench.running, None
    first, second = (s.key for s in step.batch.sequences)
    numerical = ErrorPayload(code="numerical", message="NaN")
    result = StepResult(sampled=(Sampled(first, 50),), failed=((second, numerical),))
    bench.event(StepDone(step.step, result, 0.0))
    assert bench.failed().error == numerical
    assert bench.work() == [(4, 1, True)]
    assert bench.state.load().blocks_cached == 0
    bench.step()
    assert bench.running is not None
    assert bench.running.batch.closed == (), "the engine has dropped it by itself"


def test_a_step_that_raises_fails_its_sequences_and_no_other() -> None:
    bench = Bench()
    bench.run(1, request(8, max_tokens=9))
    bench.run(2, request(3, max_tokens=1))
    bench.running = None
    bench.event(StepFailed(1, error()))
    assert bench.failed().dispatch == 1
    bench.step()
    assert bench.finished().dispatch == 2
    assert bench.empty()
