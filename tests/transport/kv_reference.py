"""What a pair of workers must answer whose KV differs in dtype: both engines in one process."""

from pathlib import Path

from shared.engine.batch import OpenSequence, SequenceInput, StepInput
from shared.engine.engine import Engine
from shared.kv.arena import KvArena
from shared.kv.copy import copy_blocks
from shared.kv.layout import KvDtype
from shared.messages.request import Sampling


class TwoEngines:
    """fp32 weights twice; the first has KV of ``dtypes[0]``, the second of ``dtypes[1]``."""

    def __init__(
        self, directory: Path, dtypes: tuple[KvDtype, KvDtype], block: int, longest: int
    ) -> None:
        self._block = block
        self._blocks = -(-longest // block)
        self._engines = [
            Engine.load(
                directory,
                precision="fp32",
                kv_dtype=dtype,
                block_size=block,
                max_model_len=longest,
                threads=1,
            )
            for dtype in dtypes
        ]
        self._arenas = [KvArena.create(engine.layout, self._blocks) for engine in self._engines]
        for engine, arena in zip(self._engines, self._arenas, strict=True):
            engine.attach(arena)

    def tokens(self, prompt: tuple[int, ...], count: int) -> list[int]:
        """Prefill with the first, convert its KV, decode with the second; greedy."""
        table = tuple(range(-(-(len(prompt) + count) // self._block)))
        sampling = Sampling(seed=1, max_tokens=count, temperature=0.0)
        whole = SequenceInput(0, prompt, 0, table, True)
        first, second = self._engines
        opened: tuple[OpenSequence, ...] = (OpenSequence(0, sampling, prompt),)
        out = [first.step(StepInput(opened, (), (whole,))).sampled[0].token]
        first.step(StepInput(closed=(0,)))
        filled = list(range(-(-len(prompt) // self._block)))
        layers = range(len(first.layout.layers))
        copy_blocks(self._arenas[0], self._arenas[1], layers, filled, filled)
        opened = (OpenSequence(0, sampling, prompt, tuple(out)),)
        while len(out) < count:
            at = len(prompt) + len(out) - 1
            part = SequenceInput(0, (out[-1],), at, table, True)
            out.append(second.step(StepInput(opened, (), (part,))).sampled[0].token)
            opened = ()
        second.step(StepInput(closed=(0,)))
        return out

    def close(self) -> None:
        """Give both pools back."""
        for engine, arena in zip(self._engines, self._arenas, strict=True):
            engine.detach()
            arena.close()
