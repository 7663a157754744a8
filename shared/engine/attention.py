"""Paged attention behind transformers' attention interface.

The registered function receives packed ``[1, heads, rows, dim]`` queries, keys and values with
positions already applied, writes K and V into the pool and attends over the block tables. No
mask is registered under its name, so models hand over none and causality is decided here.
"""

from typing import Final, Generic, Protocol, TypeVar, cast

import torch
from transformers import AttentionInterface

from shared.engine.step import OnLayer
from shared.errors import UnsupportedModel

Batch = TypeVar("Batch", contravariant=True)

ATTENTION_NAME: Final = "diptych_paged"

_IGNORED_ARGUMENTS: Final = frozenset(
    {"dropout", "position_ids", "use_cache", "output_router_logits"}
)


class LayerPool:
    """KV pool of one layer: ``k`` [blocks, block_size, heads, k_dim] and ``v`` likewise.

    ``writes`` is False for a layer that reads an earlier layer's KV.
    """

    __slots__ = ("k", "v", "writes")

    def __init__(self, k: torch.Tensor, v: torch.Tensor, *, writes: bool = True) -> None:
        self.k = k
        self.v = v
        self.writes = writes


class Scores:
    """How a layer turns dot products into weights: scaling, soft cap, sinks [query heads]."""

    __slots__ = ("scaling", "sinks", "softcap")

    def __init__(self, scaling: float, softcap: float | None, sinks: torch.Tensor | None) -> None:
        self.scaling = scaling
        self.softcap = softcap
        self.sinks = sinks


class Forward(Protocol):
    """What travels to every attention layer as the keyword argument ``paged_forward``."""

    def run(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scores: Scores,
        window: int | None,
    ) -> torch.Tensor:
        """Attend for one layer. Returns [1, rows, heads, v_dim]."""
        ...


class Kernels(Protocol[Batch]):
    """Attention and KV writes over a pool, on the CPU or on a device.

    ``shared.kernels.ops`` and ``shared.kernels.gpu.attention`` have them.
    """

    def paged_attention(
        self,
        q: torch.Tensor,
        pools: tuple[torch.Tensor, torch.Tensor],
        batch: Batch,
        /,
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend q [rows, heads, k_dim]; returns [rows, heads, v_dim]."""
        ...

    def kv_write(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Store k, v [rows, kv_heads, dim] in their slots."""
        ...


class PagedForward(Generic[Batch]):
    """One forward pass over the pool.

    ``batch`` is what the kernels know the step by, ``slots`` [rows] where its KV goes;
    ``on_layer(layer)`` is called for each layer in order.
    """

    __slots__ = ("_batch", "_kernels", "_on_layer", "_pools", "_slots")

    def __init__(
        self,
        kernels: Kernels[Batch],
        batch: Batch,
        slots: torch.Tensor,
        pools: list[LayerPool],
        on_layer: OnLayer | None,
    ) -> None:
        self._kernels = kernels
        self._batch = batch
        self._slots = slots
        self._pools = pools
        self._on_layer = on_layer

    def run(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scores: Scores,
        window: int | None,
    ) -> torch.Tensor:
        """Write this layer's KV, announce it, attend. Returns [1, rows, heads, v_dim]."""
        pool = self._pools[layer]
        if pool.writes:
            self._kernels.kv_write(_rows(key), _rows(value), pool.k, pool.v, self._slots)
        if self._on_layer is not None:
            self._on_layer(layer)
        return self._kernels.paged_attention(
            _rows(query),
            (pool.k, pool.v),
            self._batch,
            scaling=scores.scaling,
            window=window,
            softcap=scores.softcap,
            sinks=None if scores.sinks is None else scores.sinks.float().contiguous(),
        )[None]


def _rows(heads: torch.Tensor) -> torch.Tensor:
    """Turn [1, heads, rows, dim] into [rows, heads, dim] whose last axis is adjacent."""
    rows = heads[0].transpose(0, 1)
    return rows if rows.stride(2) == 1 else rows.contiguous()


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **arguments: object,
) -> tuple[torch.Tensor, None]:
    """Attention function of ``ATTENTION_NAME``; signature fixed by transformers.

    Raises:
        UnsupportedModel: the layer asks for something this attention does not do.
    """
    forward = cast(Forward, arguments.pop("paged_forward"))
    layer, scores, window = read_arguments(module, query, attention_mask, arguments)
    return forward.run(layer, query, key, value, scores, window), None


def read_arguments(
    module: torch.nn.Module,
    query: torch.Tensor,
    attention_mask: torch.Tensor | None,
    arguments: dict[str, object],
) -> tuple[int, Scores, int | None]:
    """Return layer index, scoring and window of one attention call; refuse the unknown."""
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise UnsupportedModel(f"{type(module).__name__} does not say which layer it is")
    if attention_mask is not None:
        raise UnsupportedModel(f"layer {layer} brings its own attention mask")
    causal = arguments.pop("is_causal", None)
    if causal is False or (causal is None and getattr(module, "is_causal", True) is False):
        raise UnsupportedModel(f"layer {layer} attends to later tokens (not causal)")
    scaling = arguments.pop("scaling", None)
    window = arguments.pop("sliding_window", None)
    softcap = arguments.pop("softcap", None)
    sinks = arguments.pop("s_aux", None)
    for name, argument in arguments.items():
        if argument is not None and name not in _IGNORED_ARGUMENTS:
            raise UnsupportedModel(f"layer {layer} passes `{name}` to its attention")
    if not isinstance(scaling, float):
        scaling = float(query.shape[-1]) ** -0.5
    assert window is None or isinstance(window, int)
    assert softcap is None or isinstance(softcap, float)
    assert sinks is None or isinstance(sinks, torch.Tensor)
    return layer, Scores(scaling, softcap, sinks), window


def register() -> None:
    """Make ``ATTENTION_NAME`` known to transformers; safe to repeat."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
