"""A prompt's rows without logits are spared all of the last layer but its keys and values."""

from typing import Any

import pytest
import torch

from shared.engine.batch import SequenceInput
from shared.engine.fused_runner import FusedRunner
from shared.engine.step import PackedStep
from shared.kernels.llama import LlamaStack
from shared.kernels.types import LinearKind
from tests.unit.kernel_tiers import EVERY_TIER, kernels
from tests.unit.test_kernels_stack import BLOCK_SIZE, BLOCKS, TOLERANCE, Runner, family_model

__all__ = ["kernels"]

pytestmark = pytest.mark.timeout(400)  # the first use compiles

PARTS = ((0, 17), (0, 1), (11, 1), (3, 20))
"""(start, tokens) of each sequence: prompts, whole and a chunk, among single tokens."""
STEP_ROWS = sum(count for _, count in PARTS)


class Steps:
    """A runner over pools that hold the earlier KV of every sequence."""

    def __init__(self, model: Any, kind: LinearKind) -> None:
        run = Runner(model, kind, torch.float32, blocks=BLOCKS * 4)
        self.stack: LlamaStack = run.stack
        self.pools = [*run.k, *run.v]
        self.runner = FusedRunner(run.stack, model.get_input_embeddings().weight)
        self.tables = run.tables.view(len(PARTS), -1).tolist()
        self.tokens = torch.randint(3, 300, (len(PARTS), 64)).tolist()
        earlier = [(0, start) for start, _ in PARTS]
        self.step(earlier, list(range(sum(count for _, count in earlier))))
        self.before = [pool.clone() for pool in self.pools]

    def step(
        self, parts: list[tuple[int, int]], keep: list[int], on_layer: Any = None
    ) -> torch.Tensor:
        inputs = [
            SequenceInput(i, tuple(self.tokens[i][start : start + count]), start, table, False)
            for i, ((start, count), table) in enumerate(zip(parts, self.tables, strict=True))
            if count
        ]
        packed = PackedStep(inputs, [i.block_table for i in inputs], BLOCK_SIZE)
        return self.runner.logits(packed, torch.tensor(keep, dtype=torch.int64), on_layer).values

    def kept(self, keep: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Logits of these rows, and the pools afterwards, from the same KV as ever."""
        for pool, before in zip(self.pools, self.before, strict=True):
            pool.copy_(before)
        return self.step(list(PARTS), keep), [pool.clone() for pool in self.pools]


@torch.inference_mode()
@pytest.mark.parametrize("kernels", EVERY_TIER, indirect=True)
@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logits_and_kv_do_not_depend_on_how_many_rows_are_asked_for(
    kernels: str, kind: LinearKind, family: str
) -> None:
    """Guards a row that sees another sequence, too much or too little, and KV left unwritten."""
    steps = Steps(family_model(family), kind)
    everything, pools = steps.kept(list(range(STEP_ROWS)))
    for keep in ([16, 17, 18, 38], [38], [3, 12], []):
        logits, written = steps.kept(keep)
        assert logits.shape == (len(keep), everything.shape[1])
        assert not keep or (logits - everything[keep]).norm() / logits.norm() < TOLERANCE[kind]
        for ours, theirs in zip(written, pools, strict=True):
            assert torch.equal(ours.isnan(), theirs.isnan())
            assert torch.allclose(ours, theirs, rtol=0, atol=TOLERANCE[kind], equal_nan=True)


@torch.inference_mode()
def test_every_layer_is_told_of_once_and_when_it_is_whole() -> None:
    """Guards a reader that fetches the last layer while some of its rows are written again."""
    steps = Steps(family_model("llama"), "fp32")
    _, final = steps.kept([16, 38])
    for pool, before in zip(steps.pools, steps.before, strict=True):
        pool.copy_(before)
    seen = []

    def on_layer(layer: int) -> None:
        seen.append(layer)
        for pools in (steps.pools[: steps.stack.num_layers], steps.pools[steps.stack.num_layers :]):
            number = next(i for i, pool in enumerate(steps.pools) if pool is pools[layer])
            assert torch.equal(pools[layer].nan_to_num(), final[number].nan_to_num())

    steps.step(list(PARTS), [16, 38], on_layer)
    assert seen == list(range(steps.stack.num_layers))
