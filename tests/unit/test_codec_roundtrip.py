"""What codecs give back, against an independent account of how far each may err."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shared.errors import BadConfig, NumericalError
from shared.kv.codecs.codec import Codec
from shared.kv.codecs.frame import CodecName, EncodedBlocks, KvShape
from shared.kv.codecs.grouped import GroupedCodec
from shared.kv.codecs.quantise import pack_nibbles, unpack_nibbles
from shared.kv.codecs.registry import CODEC_NAMES, make_codec
from shared.kv.codecs.sparse import SparseCodec
from shared.kv.layout import KvLayout, LayerKv
from tests.unit.codec_cases import BLOCK, DTYPES, LAYOUT, Case, cases, error_bound

BOUNDED: tuple[CodecName, ...] = ("none", "int8", "k8v4", "k4v4", "cachegen")
LOSSY = tuple(name for name in CODEC_NAMES if name != "none")
NORMAL = Case(40, 2, 8, 5, 1, "normal", 2, 7)


def round_trip(
    codec: Codec, k: torch.Tensor, v: torch.Tensor, layer: int
) -> tuple[torch.Tensor, torch.Tensor]:
    encoded = EncodedBlocks.unpack(codec.encode(k, v, layer).pack())
    return codec.decode(encoded, KvShape.of_tensors(k, v, layer))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("name", BOUNDED)
@given(case=cases)
@example(case=Case(1, 1, 1, 1, 2, "huge channel", 0, 0))
@example(case=Case(33, 1, 8, 8, 0, "tiny", 5, 1))
@example(case=Case(130, 3, 64, 31, 2, "mixed", 3, 2))
@settings(max_examples=60, deadline=None)
def test_every_element_errs_within_the_published_bound(name: CodecName, case: Case) -> None:
    """A wrong group, axis, rounding direction or packing order breaks single elements."""
    k, v = case.tensors()
    before = k.clone(), v.clone()
    got = round_trip(make_codec(name, LAYOUT), k, v, case.layer)
    assert same_bits(k, before[0]) and same_bits(v, before[1]), "the input was changed"
    for side, x, y in zip("KV", (k, v), got, strict=True):
        assert (y.shape, y.dtype, y.is_contiguous()) == (x.shape, x.dtype, True)
        error = np.abs(y.double().numpy() - x.double().numpy())
        bound = error_bound(name, x, side, case.layer)
        assert (error <= bound).all(), (side, (error - bound).max())


@given(case=cases)
@settings(max_examples=40, deadline=None)
def test_sparse_keeps_tokens_exactly_or_as_their_blocks_mean(case: Case) -> None:
    """Kept and dropped rows mixed up, or a mean over the wrong block."""
    k, v = case.tensors()
    codec = SparseCodec(0.5, BLOCK)
    got = round_trip(codec, k, v, case.layer)
    blocks = -(-case.tokens // BLOCK)
    for x, y in zip((k, v), got, strict=True):
        dropped = 0
        for start in range(0, case.tokens, BLOCK):
            theirs, ours = x[start : start + BLOCK], y[start : start + BLOCK]
            if same_bits(theirs.contiguous(), ours.contiguous()):
                continue
            dropped += 1
            assert start > 0 and start + 2 * BLOCK < case.tokens + BLOCK
            mean = theirs.double().mean(0)
            unit = torch.finfo(x.dtype)
            slack = unit.eps * theirs.double().abs().max(0).values + unit.smallest_normal * unit.eps
            assert ((ours.double() - mean).abs() <= slack * 2).all()
        assert dropped <= blocks - max(math.ceil(blocks / 2), min(3, blocks))


def test_sparse_keeps_what_new_tokens_look_at() -> None:
    """An importance that prefers the wrong end of the scores keeps the useless blocks."""
    k = torch.randn(10 * BLOCK, 1, 8, generator=torch.Generator().manual_seed(0)) * 0.1
    k[-32:, 0, 0] = 20.0
    k[4 * BLOCK : 5 * BLOCK, 0, 0] = 20.0
    v = torch.randn(10 * BLOCK, 1, 8)
    kept, _ = round_trip(SparseCodec(0.4, BLOCK), k, v, 0)
    whole = [
        b for b in range(10) if torch.equal(kept.view(10, BLOCK, 8)[b], k.view(10, BLOCK, 8)[b])
    ]
    assert whole == [0, 4, 8, 9]


@given(count=st.integers(1, 40), seed=st.integers(0, 99))
def test_nibbles_come_back_in_order(count: int, seed: int) -> None:
    codes = torch.randint(0, 16, (count,), generator=torch.Generator().manual_seed(seed))
    codes = codes.to(torch.uint8)
    assert torch.equal(unpack_nibbles(pack_nibbles(codes), count), codes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_none_carries_any_bits(dtype: torch.dtype) -> None:
    """NaN payloads and signed zeros survive only a copy that never computes."""
    raw = torch.randint(0, 256, (5, 2, 8, dtype.itemsize), dtype=torch.uint8)
    x = raw.view(dtype).view(5, 2, 8)
    k, v = round_trip(make_codec("none", LAYOUT), x, x[:, :, :3].contiguous(), 0)
    assert same_bits(k, x) and same_bits(v, x[:, :, :3].contiguous())


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["K", "V"])
def test_what_is_not_finite_is_refused_by_name(
    name: CodecName, dtype: torch.dtype, bad: float, side: str
) -> None:
    """One NaN would silently become its whole group's, or a number."""
    k, v = (x.to(dtype) for x in NORMAL.tensors())
    (k if side == "K" else v)[17, 1, 3] = bad
    with pytest.raises(NumericalError, match=f"{side} of layer 4 holds {bad}"):
        make_codec(name, LAYOUT).encode(k, v, 4)


@pytest.mark.parametrize("name", LOSSY)
def test_magnitudes_that_overflow_a_range_are_refused(name: CodecName) -> None:
    k = torch.full((3, 1, 4), 3e38)
    with pytest.raises(NumericalError, match="K of layer 0 holds"):
        make_codec(name, LAYOUT).encode(k, torch.zeros(3, 1, 4), 0)


@pytest.mark.parametrize("name", CODEC_NAMES)
@given(case=cases)
@settings(max_examples=25, deadline=None)
def test_frames_are_reproducible_and_bounded(name: CodecName, case: Case) -> None:
    """Stores compare frames; transports reserve ``worst_case_bytes`` for them."""
    k, v = case.tensors()
    layer = LayerKv(case.heads, case.k_dim, case.v_dim)
    dtype = KvShape.of_tensors(k, v, 0).dtype
    layout = KvLayout(dtype=dtype, block_size=BLOCK, layers=(layer,) * 6)
    codec = make_codec(name, layout)
    encoded = codec.encode(k, v, case.layer)
    assert encoded.pack() == codec.encode(k.clone(), v.clone(), case.layer).pack()
    assert encoded.nbytes == len(encoded.pack()) <= codec.worst_case_bytes(layout, case.tokens)
    assert KvShape.of(layout, case.layer, case.tokens) == encoded.header.shape


def test_strided_input_is_encoded_like_its_copy() -> None:
    """Views of a larger batch come in as they are."""
    k, v = NORMAL.tensors()
    wide_k, wide_v = torch.cat((k, k), 2)[:, :, ::2], torch.cat((v, v), 1)[:, ::2]
    for name in CODEC_NAMES:
        codec = make_codec(name, LAYOUT)
        strided = codec.encode(wide_k, wide_v, 1).pack()
        assert strided == codec.encode(wide_k.contiguous(), wide_v.contiguous(), 1).pack()


@pytest.mark.parametrize(
    ("k", "v"),
    [
        (torch.zeros(4, 2, 8), torch.zeros(5, 2, 8)),
        (torch.zeros(4, 2, 8), torch.zeros(4, 1, 8)),
        (torch.zeros(4, 2, 8), torch.zeros(4, 2, 8).half()),
        (torch.zeros(4, 16), torch.zeros(4, 16)),
        (torch.zeros(0, 2, 8), torch.zeros(0, 2, 8)),
        (torch.zeros(4, 2, 8).double(), torch.zeros(4, 2, 8).double()),
    ],
)
def test_tensors_that_are_no_kv_are_refused(k: torch.Tensor, v: torch.Tensor) -> None:
    for name in CODEC_NAMES:
        with pytest.raises(ValueError, match="K"):
            make_codec(name, LAYOUT).encode(k, v, 0)


def test_settings_out_of_range_are_refused() -> None:
    for group in (31, 65, 0):
        with pytest.raises(BadConfig, match="32 to 64"):
            GroupedCodec("k4v4", group)
    for keep in (0.0, 1.01, math.nan):
        with pytest.raises(BadConfig, match="keep"):
            SparseCodec(keep, BLOCK)
    with pytest.raises(BadConfig, match="no codec 'zip'"):
        make_codec("zip", LAYOUT)  # type: ignore[arg-type]


def test_entropy_code_beats_fixed_width_on_peaked_channels() -> None:
    """Tables per channel must pay for themselves where channels differ, 256 tokens suffice."""
    rng = torch.Generator().manual_seed(3)
    offsets = torch.randn(1, 2, 64, generator=rng) * 4
    x = (offsets + torch.randn(256, 2, 64, generator=rng) * 0.3).bfloat16()
    encoded = make_codec("cachegen", LAYOUT).encode(x, x, 0)
    assert encoded.header.shape.raw_bytes / encoded.nbytes > 4.5
