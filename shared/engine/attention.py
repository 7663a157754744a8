"""Paged attention behind transformers' attention interface, in plain torch.

The registered function receives packed ``[1, heads, rows, dim]`` queries, keys and values with
positions already applied, writes K and V into the pool and attends over the block tables. No
mask is registered under its name, so models hand over none and causality is decided here.
"""

from typing import Final, Protocol, cast

import torch
from torch.nn import functional
from transformers import AttentionInterface

from shared.engine.step import AttentionPlan, OnLayer, PackedStep
from shared.errors import UnsupportedModel

ATTENTION_NAME: Final = "diptych_paged"

_IGNORED_ARGUMENTS: Final = frozenset(
    {"dropout", "position_ids", "use_cache", "output_router_logits"}
)
_QUERY_ROWS: Final = 128
"""Rows of scores held at a time where sinks or a soft cap rule out the fused kernel."""


class LayerPool:
    """KV of one layer as flat slots: ``k`` [slots, heads * k_dim], ``v`` [slots, heads * v_dim].

    ``k`` and ``v`` come as [blocks, block_size, heads, dim]. ``writes`` is False for a layer
    that reads an earlier layer's KV.
    """

    __slots__ = ("heads", "k", "v", "writes")

    def __init__(self, k: torch.Tensor, v: torch.Tensor, *, writes: bool = True) -> None:
        self.heads = k.shape[2]
        self.k = k.view(k.shape[0] * k.shape[1], -1)
        self.v = v.view(v.shape[0] * v.shape[1], -1)
        self.writes = writes

    def write(self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store ``key``/``value`` [1, heads, rows, dim] in ``slots`` [rows]."""
        rows = slots.shape[0]
        self.k.index_copy_(0, slots, key[0].transpose(0, 1).reshape(rows, -1))
        self.v.index_copy_(0, slots, value[0].transpose(0, 1).reshape(rows, -1))

    def read(self, slots: torch.Tensor, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of ``slots`` [batch * length] as [batch, heads, length, dim]."""
        shape = (batch, slots.shape[0] // batch, self.heads, -1)
        k = self.k.index_select(0, slots).view(shape).transpose(1, 2)
        v = self.v.index_select(0, slots).view(shape).transpose(1, 2)
        return k, v


class Scores:
    """How a layer turns dot products into weights: scaling, soft cap, sinks [query heads]."""

    __slots__ = ("scaling", "sinks", "softcap")

    def __init__(self, scaling: float, softcap: float | None, sinks: torch.Tensor | None) -> None:
        self.scaling = scaling
        self.softcap = softcap
        self.sinks = sinks

    @property
    def plain(self) -> bool:
        """True where torch's fused attention computes the same."""
        return self.softcap is None and self.sinks is None


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


class PagedForward:
    """One forward pass over the pool."""

    __slots__ = ("on_layer", "pools", "step")

    def __init__(
        self, step: PackedStep, pools: list[LayerPool], on_layer: OnLayer | None = None
    ) -> None:
        self.step = step
        self.pools = pools
        self.on_layer = on_layer

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
        pool = self.pools[layer]
        if pool.writes:
            pool.write(self.step.slots, key, value)
        if self.on_layer is not None:
            self.on_layer(layer)
        return _attend(pool, self.step.plan(window), query, (key, value), scores)


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


def _attend(
    pool: LayerPool,
    plan: AttentionPlan,
    query: torch.Tensor,
    fresh: tuple[torch.Tensor, torch.Tensor],
    scores: Scores,
) -> torch.Tensor:
    _, heads, rows, dim = query.shape
    groups = heads // pool.heads
    out = query.new_empty((rows, heads, pool.v.shape[1] // pool.heads))
    for group in plan.decodes:
        n = group.last - group.first
        k, v = pool.read(group.slots, n)
        # The query heads of one KV head become the rows of one small matrix.
        q = query[0, :, group.first : group.last].transpose(0, 1)
        q = q.reshape(n, pool.heads, groups, dim)
        attended = _weighted(q, k, v, group.mask, scores)
        out[group.first : group.last] = attended.reshape(n, heads, -1)
    for chunk in plan.chunks:
        span = slice(chunk.first, chunk.last)
        if chunk.slots is None:
            k, v = fresh[0][:, :, span], fresh[1][:, :, span]
        else:
            k, v = pool.read(chunk.slots, 1)
        out[span] = _prefill(query[:, :, span], k, v, chunk.mask, scores)
    return out[None]


def _weighted(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scores: Scores,
) -> torch.Tensor:
    """Attend q [n, kv heads, group, dim]; returns [n, kv heads, group, v_dim]."""
    if scores.plain:
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scores.scaling
        )
    sinks = scores.sinks
    if sinks is not None:
        sinks = sinks.view(1, q.shape[1], q.shape[2], 1)
    return torch.matmul(_weights(q, k, mask, scores, sinks), v)


def _prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scores: Scores,
) -> torch.Tensor:
    """Attend q [1, heads, rows, dim] over k, v [1, kv heads, length, dim]; [rows, heads, v_dim]."""
    _, heads, rows, dim = q.shape
    kv_heads, length = k.shape[1], k.shape[2]
    if scores.plain:
        attended = functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scores.scaling,
            enable_gqa=heads != kv_heads,
        )
        return attended[0].transpose(0, 1)
    sinks = scores.sinks
    if sinks is not None:
        sinks = sinks.view(kv_heads, -1, 1, 1)
    if mask is None:
        mask = torch.full((rows, length), float("-inf"), dtype=q.dtype).triu_(1)
    out = q.new_empty((rows, heads, v.shape[-1]))
    grouped = q.reshape(kv_heads, heads // kv_heads, rows, dim)
    for low in range(0, rows, _QUERY_ROWS):
        part = grouped[:, :, low : low + _QUERY_ROWS]
        weights = _weights(part, k[0, :, None], mask[low : low + _QUERY_ROWS], scores, sinks)
        attended = torch.matmul(weights, v[0, :, None])
        out[low : low + _QUERY_ROWS] = attended.flatten(0, 1).transpose(0, 1)
    return out


def _weights(
    q: torch.Tensor,
    k: torch.Tensor,
    mask: torch.Tensor | None,
    scores: Scores,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return softmax weights; a sink takes part in the sum and is dropped from the result."""
    logits = torch.matmul(q, k.transpose(-1, -2)) * scores.scaling
    if scores.softcap is not None:
        logits = torch.tanh(logits / scores.softcap) * scores.softcap
    if mask is not None:
        logits = logits + mask
    logits = logits.float()
    if sinks is None:
        return torch.softmax(logits, dim=-1).to(q.dtype)
    column = sinks.float().expand(*logits.shape[:-1], 1)
    weights = torch.softmax(torch.cat((logits, column), dim=-1), dim=-1)
    return weights[..., :-1].to(q.dtype)


def register() -> None:
    """Make ``ATTENTION_NAME`` known to transformers; safe to repeat."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
