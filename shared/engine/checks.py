"""Load-time checks: a model that our attention would serve wrongly is refused with the reason.

Each check stands for a way in which transformers models were seen to go wrong without an error:
attention that bypasses the interface, recurrent state, windows that only a mask carries, and
anything that lets packed sequences see one another.
"""

import inspect
from typing import Final

import numpy as np
import torch

from shared.config import Precision
from shared.engine.attention import ATTENTION_NAME, LayerPool, PagedForward, Scores
from shared.engine.batch import SequenceInput
from shared.engine.loading import TORCH_DTYPES, HfModel, text_config
from shared.engine.step import IntArray, PackedStep
from shared.errors import UnsupportedModel
from shared.kv.layout import KvLayout, LayerKv

_LAYER_TYPES: Final = frozenset({"full_attention", "sliding_attention"})
_LENGTHS: Final = (9, 6)
_TOLERANCE: Final[dict[Precision, float]] = {"fp32": 1e-3, "bf16": 0.15, "fp16": 0.05}
"""Relative error of the median row; a leak or a lost mask gives about 1 in most rows."""


class _Recorder:
    """Stands in for the pool: notes each layer's shapes, returns zeros."""

    def __init__(self) -> None:
        self.layers: list[int] = []
        self.seen: list[LayerKv] = []
        self._keys: list[torch.Tensor] = []

    def run(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scores: Scores,
        window: int | None,
    ) -> torch.Tensor:
        shares = None
        for earlier, known in zip(self.layers, self._keys, strict=True):
            if known.data_ptr() == key.data_ptr():
                shares = earlier
                break
        self.layers.append(layer)
        self._keys.append(key)  # held, so that no later tensor can take its address
        self.seen.append(
            LayerKv(
                heads=key.shape[1],
                k_dim=key.shape[3],
                v_dim=value.shape[3],
                window=window,
                shares=shares,
            )
        )
        return query.new_zeros((1, query.shape[2], query.shape[1], value.shape[3]))


def inspect_model(model: HfModel, precision: Precision, block_size: int) -> KvLayout:
    """Run every check and return the KV layout, with shapes taken from a dummy run's tensors.

    Raises:
        UnsupportedModel: a check failed; the sentence says which.
    """
    name = type(model).__name__
    _refuse_state(model, name)
    _refuse_signature(model, name)
    with torch.inference_mode():
        recorder = _record(model, name)
        layout = KvLayout(dtype=precision, block_size=block_size, layers=tuple(recorder.seen))
        _compare_windows(model, name, layout)
        _compare_with_reference(model, name, layout)
    return layout


def _refuse_state(model: HfModel, name: str) -> None:
    types = set(getattr(text_config(model), "layer_types", None) or ())
    if getattr(model, "_is_stateful", False):
        others = sorted(types - _LAYER_TYPES)
        detail = f" (layers of type {', '.join(others)})" if others else ""
        raise UnsupportedModel(
            f"{name} keeps recurrent state beside the KV{detail}; only attention models are served"
        )
    if types - _LAYER_TYPES:
        raise UnsupportedModel(
            f"{name} has layers of type {', '.join(sorted(types - _LAYER_TYPES))}; "
            f"only {', '.join(sorted(_LAYER_TYPES))} are served"
        )


def _refuse_signature(model: HfModel, name: str) -> None:
    parameters = inspect.signature(model.forward).parameters
    missing = [p for p in ("position_ids", "logits_to_keep") if p not in parameters]
    if missing:
        raise UnsupportedModel(f"{name}.forward does not take {', '.join(missing)}")
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        raise UnsupportedModel(f"{name}.forward does not hand keyword arguments to its attention")


def _tokens(model: HfModel, which: int, count: int) -> tuple[int, ...]:
    size = model.get_input_embeddings().weight.shape[0]
    return tuple((31 * i + 17 * which + 3) % size for i in range(count))


def _record(model: HfModel, name: str) -> _Recorder:
    recorder = _Recorder()
    a, b = _LENGTHS
    try:
        output = model(
            input_ids=torch.tensor([_tokens(model, 0, a) + _tokens(model, 1, b)]),
            position_ids=torch.tensor([[*range(a), *range(b)]]),
            use_cache=False,
            logits_to_keep=torch.tensor([a - 1, a + b - 1]),
            paged_forward=recorder,
        )
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError) as error:
        raise UnsupportedModel(f"{name} does not accept a packed batch: {error!r}") from error
    expected = list(range(int(text_config(model).num_hidden_layers)))
    if recorder.layers != expected:
        missing = sorted(set(expected) - set(recorder.layers))
        detail = f"layers {missing} never called it" if missing else f"calls: {recorder.layers}"
        raise UnsupportedModel(
            f"{name} does not compute all attention through transformers' attention interface: "
            f"{detail}"
        )
    if tuple(output.logits.shape[:2]) != (1, 2):
        raise UnsupportedModel(f"{name} ignores which positions' logits are asked for")
    return recorder


def _compare_windows(model: HfModel, name: str, layout: KvLayout) -> None:
    config = text_config(model)
    types = getattr(config, "layer_types", None)
    for index, layer in enumerate(layout.layers):
        if types is not None:
            sliding = types[index] == "sliding_attention"
        else:
            sliding = getattr(config, "sliding_window", None) is not None and bool(
                getattr(config, "use_sliding_window", True)
            )
        if sliding and layer.window is None:
            raise UnsupportedModel(
                f"{name}: layer {index} has a sliding window but does not tell its attention"
            )


def _compare_with_reference(model: HfModel, name: str, layout: KvLayout) -> None:
    """Compare packed, chunked, paged logits with the model's own attention, one prompt a time."""
    lengths = _LENGTHS
    prompts = [_tokens(model, which, n) for which, n in enumerate(lengths)]
    paged = _paged_logits(model, layout, prompts)
    model.set_attn_implementation("eager")
    try:
        alone = [
            model(
                input_ids=torch.tensor([prompt]),
                position_ids=torch.arange(len(prompt))[None],
                use_cache=False,
            ).logits[0]
            for prompt in prompts
        ]
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    for reference, ours in zip(alone, paged, strict=True):
        difference = (ours.float() - reference.float()).norm(dim=-1)
        error = (difference / reference.float().norm(dim=-1)).median().item()
        if not error <= _TOLERANCE[layout.dtype]:
            raise UnsupportedModel(
                f"{name}: packed and paged logits differ from the model's own "
                f"(relative error {error:.3g}, {_TOLERANCE[layout.dtype]:.3g} allowed)"
            )


def _paged_logits(
    model: HfModel,
    layout: KvLayout,
    prompts: list[tuple[int, ...]],
) -> list[torch.Tensor]:
    """Run two prompts in three steps: a chunk, a chunk beside a prompt, and two decodes."""
    pools, tables = _private_pool(layout, [len(p) for p in prompts])
    a, b = (len(p) for p in prompts)
    steps = [[(0, 0, a // 2)], [(0, a // 2, a - 1), (1, 0, b - 1)], [(0, a - 1, a), (1, b - 1, b)]]
    logits: list[list[torch.Tensor]] = [[], []]
    for parts in steps:
        sequences = [
            SequenceInput(
                key=which,
                tokens=prompts[which][low:high],
                start=low,
                block_table=(),
                sample=False,
            )
            for which, low, high in parts
        ]
        step = PackedStep(
            sequences,
            [tables[which] for which, _, _ in parts],
            layout.block_size,
            TORCH_DTYPES[layout.dtype],
        )
        rows = model(
            input_ids=step.token_ids,
            position_ids=step.positions,
            use_cache=False,
            paged_forward=PagedForward(step, pools),
        ).logits[0]
        for index, packed in enumerate(step.order):
            logits[parts[packed][0]].append(rows[step.rows[index] : step.rows[index + 1]])
    return [torch.cat(parts) for parts in logits]


def _private_pool(layout: KvLayout, lengths: list[int]) -> tuple[list[LayerPool], list[IntArray]]:
    """Return pools of just enough blocks and interleaved block tables, last block first."""
    size = layout.block_size
    blocks = max(-(-n // size) for n in lengths)
    count = blocks * len(lengths)
    dtype = TORCH_DTYPES[layout.dtype]
    storage: list[tuple[torch.Tensor, torch.Tensor]] = []
    pools: list[LayerPool] = []
    for index, layer in enumerate(layout.layers):
        owner = layout.owner(index)
        if owner == index:
            k = torch.zeros((count, size, layer.heads, layer.k_dim), dtype=dtype)
            v = torch.zeros((count, size, layer.heads, layer.v_dim), dtype=dtype)
            storage.append((k, v))
        else:
            storage.append(storage[owner])
        pools.append(LayerPool(*storage[-1], writes=owner == index))
    tables = [
        np.arange(count - 1 - which, -1, -len(lengths), dtype=np.int64)
        for which in range(len(lengths))
    ]
    return pools, tables
