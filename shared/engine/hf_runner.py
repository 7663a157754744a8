"""Transformers' own layers, with attention and KV writes over the paged pool."""

from collections.abc import Sequence

import torch

from shared.engine.attention import LayerPool, PagedForward
from shared.engine.loading import HfModel
from shared.engine.runner import Logits
from shared.engine.step import OnLayer, PackedStep
from shared.kernels import ops
from shared.kv.layout import KvLayout


class HfRunner:
    """See ``ModelRunner``. ``layout`` says which layers read an earlier layer's KV."""

    name = "transformers layers"

    def __init__(self, model: HfModel, layout: KvLayout) -> None:
        self._model = model
        self._writes = [layout.owner(i) == i for i in range(len(layout.layers))]
        self._pools: list[LayerPool] = []

    def attach(self, k: Sequence[torch.Tensor], v: Sequence[torch.Tensor]) -> None:
        """Use these pools; those of a layer that shares are its owner's."""
        self._pools = [
            LayerPool(*pool, writes=writes)
            for *pool, writes in zip(k, v, self._writes, strict=True)
        ]

    def logits(
        self, step: PackedStep, keep: torch.Tensor, on_layer: OnLayer | None = None
    ) -> Logits:
        """Run the model once; logits in its own dtype."""
        logits: torch.Tensor = self._model(
            input_ids=step.token_ids,
            position_ids=step.positions,
            use_cache=False,
            logits_to_keep=keep,
            paged_forward=PagedForward(ops, step.batch, step.slots, self._pools, on_layer),
        ).logits[0]
        return Logits(logits)
