"""KV to encode, and an independent account (plain numpy, float64) of how far a codec may err."""

import numpy as np
import torch
from hypothesis import strategies as st
from msgspec import Struct
from numpy.typing import NDArray

from shared.kv.codecs.cachegen import K_HALF, V_HALF
from shared.kv.codecs.frame import CodecName
from shared.kv.layout import KvLayout, LayerKv

Array = NDArray[np.float64]

NUM_LAYERS = 6
BLOCK = 16
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ULP = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
SMALLEST = {torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}
LARGEST = {torch.float32: 1e38, torch.bfloat16: 9.9e37, torch.float16: 65504.0}
LAYOUT = KvLayout(dtype="bf16", block_size=BLOCK, layers=(LayerKv(2, 8, 8),) * NUM_LAYERS)

PATTERNS = ("normal", "constant", "zero", "huge channel", "tiny", "mixed", "outlier token")


class Case(Struct, frozen=True):
    tokens: int
    heads: int
    k_dim: int
    v_dim: int
    dtype: int
    pattern: str
    layer: int
    seed: int

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._side(self.k_dim, 0), self._side(self.v_dim, 1)

    def _side(self, dim: int, side: int) -> torch.Tensor:
        dtype = DTYPES[self.dtype]
        rng = np.random.default_rng((self.seed, side))
        x = rng.normal(size=(self.tokens, self.heads, dim))
        match self.pattern:
            case "constant":
                x[:] = 3.25
            case "zero":
                x[:] = 0
            case "huge channel":
                x[:, 0, 0] = rng.choice((-1.0, 1.0), self.tokens) * LARGEST[dtype]
            case "tiny":
                x *= SMALLEST[dtype] * 300
            case "mixed":
                x *= 10.0 ** rng.integers(-4, 4, (1, self.heads, dim))
                x[:, :, 0] = 7
            case "outlier token":
                x[-1] *= 1000
        return torch.from_numpy(x).to(dtype)


cases = st.builds(
    Case,
    tokens=st.sampled_from((1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 97, 130)),
    heads=st.integers(1, 3),
    k_dim=st.sampled_from((1, 3, 8, 33, 64, 80)),
    v_dim=st.sampled_from((1, 5, 8, 31, 64, 72)),
    dtype=st.integers(0, 2),
    pattern=st.sampled_from(PATTERNS),
    layer=st.integers(0, NUM_LAYERS - 1),
    seed=st.integers(0, 2**32),
)


def error_bound(name: CodecName, x: torch.Tensor, side: str, layer: int) -> Array:
    """Largest allowed |decoded - x| per element, by the codec's published rule."""
    values = x.double().numpy()
    match name:
        case "none":
            return np.zeros(values.shape)
        case "int8":
            step = np.abs(values).max(axis=2, keepdims=True) / 127
        case "cachegen":
            halves = (K_HALF if side == "K" else V_HALF)[layer * 3 // NUM_LAYERS]
            step = np.abs(values).max(axis=(1, 2), keepdims=True) / halves
        case "k8v4" | "k4v4":
            group = 64 if name == "k8v4" else 32
            levels = 255 if (name, side) == ("k8v4", "K") else 15
            step = _ranges(values, 0 if side == "K" else 2, group) / levels
        case _:
            raise AssertionError(name)
    ulp, reach = ULP[x.dtype], np.abs(values).max()
    # The stored step is rounded up by a unit in its last place, the result once more.
    step = step * (1 + ulp) + SMALLEST[x.dtype]
    near = np.minimum(np.abs(values) + step, reach)
    bound: Array = step / 2 * (1 + 2.0**-20) + near * (ulp / 2) + near * 2.0**-21
    return np.broadcast_to(bound + 2 * SMALLEST[x.dtype], values.shape)


def _ranges(values: Array, axis: int, group: int) -> Array:
    ranges = np.empty(values.shape)
    for start in range(0, values.shape[axis], group):
        part = [slice(None)] * 3
        part[axis] = slice(start, start + group)
        cut = values[tuple(part)]
        ranges[tuple(part)] = cut.max(axis=axis, keepdims=True) - cut.min(axis=axis, keepdims=True)
    return ranges
