"""What a step costs besides the model, measured around a small engine."""

from collections.abc import Iterator

import pytest

from shared.engine.batch import StepInput, StepResult
from shared.engine.engine import Engine
from shared.errors import NumericalError
from shared.kv.arena import KvArena
from tests.unit.engine_models import CONFIGS, VOCAB, load_engine, prompt, save_model
from tools.bench.engine.host import HostSide, samplings_of

BATCH = 9
PROMPTS = [prompt(seed, 12) for seed in range(BATCH)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return load_engine(save_model(tmp_path_factory.mktemp("llama"), CONFIGS["llama"]()))


@pytest.fixture
def arena(engine: Engine) -> Iterator[KvArena]:
    arena = KvArena.create(engine.layout, 1024)
    engine.attach(arena)
    yield arena
    engine.detach()
    arena.close()


@pytest.mark.parametrize("kind", ["greedy", "mixed"])
def test_every_step_counts_without_the_model(
    engine: Engine, arena: KvArena, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: prefills or half-full steps among the figures, or the model's time in them."""
    sizes: list[int] = []
    step = engine.step

    def slow(batch: StepInput) -> StepResult:
        sizes.append(len(batch.sequences))
        result = step(batch)
        engine.model_seconds += 1000.0
        return result

    monkeypatch.setattr(engine, "step", slow)
    side = HostSide(engine, arena, BATCH)
    times = side.measure(PROMPTS, samplings_of(kind, BATCH, 1 << 20), 4)
    assert len(times) == 4
    assert all(seconds < -900.0 for seconds in times)
    assert sizes[-1] == 0
    assert sizes[-8:-1] == [BATCH] * 7
    # the same keys may be opened again: nothing of these sequences was left behind
    assert len(engine._sampler) == 0


def test_a_sequence_that_ends_early_is_told(engine: Engine, arena: KvArena) -> None:
    """Guards: a figure of fewer sequences than asked for."""
    side = HostSide(engine, arena, BATCH)
    with pytest.raises(NumericalError, match="ended before"):
        side.measure(PROMPTS, samplings_of("greedy", BATCH, 2), 4)


def test_mixed_sampling_has_every_kind_of_work() -> None:
    """Guards: a bench of sampled batches in which half of the sampler never runs."""
    mixed = samplings_of("mixed", 16, 5)
    assert len({s.seed for s in mixed}) == 16
    assert {s.max_tokens for s in mixed} == {5}
    plain = samplings_of("greedy", 1, 5)[0]
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logprobs"):
        values = {getattr(s, name) for s in mixed}
        assert len(values - {getattr(plain, name)}) >= 1, name
    assert any(s.logit_bias for s in mixed)
    assert all(token < VOCAB for s in mixed for token in s.logit_bias)
