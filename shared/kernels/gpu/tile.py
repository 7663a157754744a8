"""One step of attention: a tile of keys read through the block table and added to running sums.

The running softmax of FlashAttention (Dao et al., 2022). Scores live in units of log2, since
``exp2`` is what the hardware has.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def scores_of(products: tl.tensor, form: tl.constexpr) -> tl.tensor:
    """Turn dot products into scores in units of log2."""
    scores = products * form.scale
    if form.softcap > 0.0:
        # tanh by the sigmoid: the interpreter has no tanh.
        scores = form.softcap * (2.0 * tl.sigmoid(2.0 * scores / form.softcap) - 1.0)
    return scores * LOG2E


@triton.jit
def product(a: tl.tensor, b: tl.tensor, form: tl.constexpr) -> tl.tensor:
    """Multiply two matrices, with sums in fp32."""
    if form.exact:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a.to(b.dtype), b)


@triton.jit
def place_of(table: tl.tuple, keys: tl.tensor, live: tl.tensor, form: tl.constexpr) -> tl.tensor:
    """Return the pool slot of each live key. ``table``: its first entry and its stride."""
    first, stride = table
    block = tl.load(first + keys // form.block_size * stride, mask=live, other=0)
    return block.to(tl.int64) * form.block_size + keys % form.block_size


@triton.jit
def scale_of(
    scales: tl.tensor, place: tl.tensor, live: tl.tensor, width: tl.constexpr, dim: tl.constexpr
) -> tl.tensor:
    """Return the scale at the end of each live row; ``scales`` is the pool seen as fp32."""
    return tl.load(scales + place * (width // 4) + dim // 4, mask=live, other=0.0)


@triton.jit
def absorb(
    state: tl.tuple,
    query: tl.tensor,
    pools: tl.tuple,
    place: tl.tensor,
    masks: tl.tuple,
    form: tl.constexpr,
) -> tl.tuple:
    """Add a tile of keys to ``state``: peak and weight [rows], value [rows, v_pad], all fp32.

    ``query`` [rows, k_pad]; ``place`` [keys] are slot * kv_heads + head; ``masks``: which keys
    may be read [keys], and which each row sees [rows or 1, keys]. ``pools`` are K, V, and the
    same memory as fp32, which is read where rows are scaled.
    """
    peak, weight, value = state
    k_pool, v_pool, k_scales, v_scales = pools
    live, seen = masks
    k_column, v_column = tl.arange(0, form.k_pad), tl.arange(0, form.v_pad)
    k = tl.load(
        k_pool + place[None, :] * form.k_width + k_column[:, None],
        mask=live[None, :] & (k_column < form.k_dim)[:, None],
        other=0.0,
    )
    if form.scaled:
        k_scale = scale_of(k_scales, place, live, form.k_width, form.k_dim)
        k = (k.to(tl.float32) * k_scale[None, :]).to(query.dtype)
    scores = scores_of(product(query, k, form), form)
    scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, 1))
    # Where nothing was seen yet, -inf less -inf would be NaN.
    base = tl.where(higher == float("-inf"), 0.0, higher)
    share = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(peak - base)
    v = tl.load(
        v_pool + place[:, None] * form.v_width + v_column[None, :],
        mask=live[:, None] & (v_column < form.v_dim)[None, :],
        other=0.0,
    )
    if form.scaled:
        v_scale = scale_of(v_scales, place, live, form.v_width, form.v_dim)
        v = (v.to(tl.float32) * v_scale[:, None]).to(query.dtype)
    value = value * shrink[:, None] + product(share, v, form)
    return higher, weight * shrink + tl.sum(share, 1), value
