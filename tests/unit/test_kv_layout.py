"""Sizes, aliases and fingerprints of the KV layout."""

import msgspec
import pytest

from shared.errors import UnsupportedModel
from shared.kv.layout import KvLayout, LayerKv

PLAIN = LayerKv(heads=3, k_dim=64, v_dim=64)


def test_block_bytes_count_own_storage_only() -> None:
    """Guards the memory budget: shared layers must not be paid twice, K and V may differ."""
    layers = (PLAIN, LayerKv(3, 64, 64, shares=0), LayerKv(1, 192, 128))
    layout = KvLayout(dtype="bf16", block_size=16, layers=layers)
    assert layout.layer_block_bytes(0) == 16 * 3 * (64 + 64) * 2
    assert layout.layer_block_bytes(1) == 0
    assert layout.layer_block_bytes(2) == 16 * (192 + 128) * 2
    assert layout.block_bytes == layout.layer_block_bytes(0) + layout.layer_block_bytes(2)
    assert [layout.owner(i) for i in range(3)] == [0, 0, 2]


def test_scales_are_part_of_an_int8_block() -> None:
    """Guards the memory budget and chunk plans: each token and head has an fp32 scale."""
    layers = (PLAIN, LayerKv(1, 192, 128))
    layout = KvLayout(dtype="int8", block_size=16, layers=layers)
    assert layout.layer_block_bytes(0) == 16 * 3 * (64 + 4 + 64 + 4)
    assert layout.layer_block_bytes(1) == 16 * (192 + 4 + 128 + 4)
    with pytest.raises(UnsupportedModel, match=r"`kv_dtype: int8`.*2048.*bf16 or fp16"):
        KvLayout(dtype="int8", block_size=16, layers=(LayerKv(1, 2049, 64),))


def test_fingerprint_tells_every_difference() -> None:
    """Guards scenarios 39 and 44: peers whose blocks mean something else must not fit."""
    base = KvLayout(dtype="bf16", block_size=16, layers=(PLAIN, PLAIN))
    others = [
        KvLayout(dtype="fp16", block_size=16, layers=(PLAIN, PLAIN)),
        KvLayout(dtype="bf16", block_size=32, layers=(PLAIN, PLAIN)),
        KvLayout(dtype="bf16", block_size=16, layers=(PLAIN,)),
        KvLayout(dtype="bf16", block_size=16, layers=(PLAIN, LayerKv(3, 64, 64, shares=0))),
        KvLayout(dtype="bf16", block_size=16, layers=(PLAIN, LayerKv(3, 64, 64, window=128))),
        KvLayout(dtype="bf16", block_size=16, layers=(PLAIN, LayerKv(64, 3, 64))),
        KvLayout(dtype="bf16", block_size=16, layers=(PLAIN, LayerKv(3, 65, 63))),
    ]
    assert len({layout.fingerprint() for layout in [base, *others]}) == 8
    assert base.fingerprint() == KvLayout(**msgspec.structs.asdict(base)).fingerprint()


def test_another_arrangement_of_a_block_is_another_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards 39: heads before tokens (HND for NHD) has the same sizes and must not fit."""
    layout = KvLayout(dtype="bf16", block_size=16, layers=(PLAIN,))
    ours = layout.fingerprint()
    monkeypatch.setattr("shared.kv.layout._ARRANGEMENT", "block,head,token,dim/1")
    assert layout.fingerprint() != ours


def test_fingerprint_is_stable() -> None:
    """Guards rolling restarts: the fingerprint of a layout must not change between builds."""
    layout = KvLayout(dtype="bf16", block_size=16, layers=(PLAIN,) * 30)
    assert layout.fingerprint() == "8ac1f0b36dbfbf4803baae2096e56fc9"


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((), "at least one layer"),
        ((LayerKv(0, 64, 64),), "layer 0: heads"),
        ((LayerKv(1, 64, 64, window=0),), "window"),
        ((LayerKv(1, 64, 64, shares=0),), "earlier layer"),
        ((PLAIN, LayerKv(3, 64, 64, shares=-1)), "earlier layer"),
        ((PLAIN, LayerKv(3, 64, 64, shares=0), LayerKv(3, 64, 64, shares=1)), "own storage"),
        ((PLAIN, LayerKv(3, 32, 64, shares=0)), "shape differs"),
    ],
)
def test_impossible_layouts_are_refused(layers: tuple[LayerKv, ...], message: str) -> None:
    """Guards arena arithmetic against layers that point nowhere."""
    with pytest.raises(UnsupportedModel, match=message):
        KvLayout(dtype="fp32", block_size=16, layers=layers)
