"""Load-time checks: a model that our attention would serve wrongly is refused with the reason.

Each check stands for a way in which transformers models were seen to go wrong without an error:
attention that bypasses the interface, recurrent state, windows that only a mask carries.
``comparison`` holds the net under all of them.
"""

import inspect
from typing import Final

import torch

from shared.engine.attention import Scores
from shared.engine.loading import HfModel, text_config
from shared.errors import UnsupportedModel
from shared.kv.layout import KvDtype, KvLayout, LayerKv

_LAYER_TYPES: Final = frozenset({"full_attention", "sliding_attention"})


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


def inspect_model(model: HfModel, kv_dtype: KvDtype, block_size: int) -> KvLayout:
    """Check how the model uses its attention; return the KV layout of a dummy run's tensors.

    Raises:
        UnsupportedModel: a check failed; the sentence says which.
    """
    name = type(model).__name__
    _refuse_state(model, name)
    _refuse_signature(model, name)
    with torch.inference_mode():
        recorder = _record(model, name)
    layout = KvLayout(dtype=kv_dtype, block_size=block_size, layers=tuple(recorder.seen))
    _compare_windows(model, name, layout)
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


def _record(model: HfModel, name: str) -> _Recorder:
    recorder = _Recorder()
    a, b = 9, 6
    try:
        output = model(
            input_ids=torch.zeros((1, a + b), dtype=torch.int64),
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
