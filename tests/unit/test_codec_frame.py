"""Damaged, truncated, foreign and forged frames: a named error, never wrong KV."""

import hashlib
import struct
from collections.abc import Callable

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import TransferFailed
from shared.kv.codecs.codec import Codec
from shared.kv.codecs.frame import (
    FRAME_VERSION,
    BinnedParameters,
    CodecHeader,
    CodecName,
    EncodedBlocks,
    GroupedParameters,
    KvShape,
    Parameters,
    SparseParameters,
)
from shared.kv.codecs.registry import CODEC_NAMES, make_codec
from tests.unit.codec_cases import LAYOUT, Case

replace = msgspec.structs.replace

SMALL = Case(34, 1, 8, 5, 1, "normal", 2, 7)
CODED = Case(320, 1, 8, 8, 1, "outlier token", 2, 7)
"""Enough tokens for the entropy code to be used."""


def encode(name: CodecName, case: Case = SMALL) -> tuple[Codec, EncodedBlocks, KvShape]:
    codec = make_codec(name, LAYOUT)
    k, v = case.tensors()
    return codec, codec.encode(k, v, case.layer), KvShape.of_tensors(k, v, case.layer)


def reseal(encoded: EncodedBlocks, payload: bytes, parameters: Parameters | None) -> EncodedBlocks:
    """A forger's frame: everything about it holds, but nobody encoded this."""
    header = encoded.header
    return EncodedBlocks.seal(header.codec, header.shape, parameters, bytearray(payload))


def refused(codec: Codec, data: bytes, shape: KvShape) -> str:
    with pytest.raises(TransferFailed) as caught:
        codec.decode(EncodedBlocks.unpack(data), shape)
    return caught.value.message


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_every_changed_byte_is_noticed(name: CodecName) -> None:
    """Each byte of prefix, header and payload, in its lowest, highest and all bits."""
    codec, encoded, shape = encode(name)
    frame = encoded.pack()
    for at in range(len(frame)):
        for flip in (0x01, 0x80, 0xFF):
            damaged = bytearray(frame)
            damaged[at] ^= flip
            refused(codec, bytes(damaged), shape)


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_every_truncation_and_excess_is_noticed(name: CodecName) -> None:
    codec, encoded, shape = encode(name)
    frame = encoded.pack()
    for length in range(len(frame)):
        refused(codec, frame[:length], shape)
    for excess in (b"\0", frame):
        assert "announced" in refused(codec, frame + excess, shape)


@pytest.mark.parametrize("name", CODEC_NAMES)
@pytest.mark.parametrize("field", KvShape.__struct_fields__)
def test_other_kv_than_expected_is_refused_by_field(name: CodecName, field: str) -> None:
    """A frame of another layer, chunk, model or dtype decodes well, into the wrong place."""
    codec, encoded, shape = encode(name)
    value = "fp16" if field == "dtype" else getattr(shape, field) + 1
    with pytest.raises(TransferFailed, match=f"{field} is .*, expected {value!r}"):
        codec.decode(encoded, replace(shape, **{field: value}))


@pytest.mark.parametrize("field", CodecHeader.__struct_fields__)
@pytest.mark.parametrize("name", CODEC_NAMES)
def test_every_header_field_is_under_the_checksum(name: CodecName, field: str) -> None:
    """The bytes are well-formed after the change, only their meaning is another."""
    codec, encoded, shape = encode(name)
    header = encoded.header
    others = {
        "codec": "int8" if name != "int8" else "none",
        "shape": replace(shape, tokens=shape.tokens + 1),
        "parameters": GroupedParameters(4, 4, 33),
        "payload_bytes": header.payload_bytes - 1,
        "checksum": bytes(8),
    }
    changed = EncodedBlocks(replace(header, **{field: others[field]}), encoded.payload)
    with pytest.raises(TransferFailed):
        codec.decode(changed, changed.header.shape)


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_frames_of_other_codecs_are_refused(name: CodecName) -> None:
    codec, _, shape = encode(name)
    for other in CODEC_NAMES:
        if other != name:
            message = refused(codec, encode(other)[1].pack(), shape)
            assert message == f"KV encoded by {other!r}, expected {name!r}"


def test_prefix_is_checked_before_the_header_is_read() -> None:
    codec, encoded, shape = encode("int8")
    frame = encoded.pack()
    assert "magic" in refused(codec, b"XXXX" + frame[4:], shape)
    newer = frame[:4] + struct.pack("<H", FRAME_VERSION + 1) + frame[6:]
    assert f"version {FRAME_VERSION + 1}" in refused(codec, newer, shape)
    for size in (0, 1, 1025, 2**32 - 1):
        refused(codec, frame[:6] + struct.pack("<I", size) + frame[10:], shape)


@given(data=st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(TransferFailed):
        EncodedBlocks.unpack(data)
    with pytest.raises(TransferFailed):
        EncodedBlocks.unpack(b"DKVC\1\0" + struct.pack("<I", len(data)) + data)


def test_read_only_and_wide_buffers_are_read() -> None:
    """ZeroMQ hands out read-only memory; a mapped store need not be made of bytes."""
    codec, encoded, shape = encode("k4v4")
    frame = encoded.pack()
    want = codec.decode(encoded, shape)
    padded = torch.frombuffer(bytearray(frame), dtype=torch.uint8).numpy()
    for view in (memoryview(frame).toreadonly(), memoryview(padded), bytearray(frame)):
        got = codec.decode(EncodedBlocks.unpack(view), shape)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_result_does_not_alias_the_frame() -> None:
    """A transport reuses its buffer while the KV is still in use."""
    for name in CODEC_NAMES:
        codec, encoded, shape = encode(name)
        frame = bytearray(encoded.pack())
        k, v = codec.decode(EncodedBlocks.unpack(frame), shape)
        kept = k.clone(), v.clone()
        frame[:] = bytes(len(frame))
        assert torch.equal(k, kept[0]) and torch.equal(v, kept[1])


@pytest.mark.parametrize("name", CODEC_NAMES)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_forged_payloads_fail_or_have_the_right_shape(name: CodecName, data: st.DataObject) -> None:
    """With a right checksum over wrong bytes: no crash, no other exception, no other shape."""
    codec, encoded, shape = encode(name, data.draw(st.sampled_from((SMALL, CODED))))
    payload = bytearray(encoded.payload)
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.sampled_from((0, 0, 0, 1, 5)))
    forged = reseal(encoded, bytes(payload[: len(payload) - cut]), encoded.header.parameters)
    try:
        k, v = codec.decode(forged, shape)
    except TransferFailed:
        return
    assert k.shape == (shape.tokens, shape.heads, shape.k_dim)
    assert v.shape == (shape.tokens, shape.heads, shape.v_dim)


def test_forged_parameters_are_refused() -> None:
    """Parameters decide how much is read and how: none may lead outside the payload."""

    def grouped(by: GroupedParameters) -> list[Parameters | None]:
        return [replace(by, group=1), replace(by, group=65536), replace(by, k_bits=12 - by.k_bits)]

    def binned(by: BinnedParameters) -> list[Parameters | None]:
        sides = [
            replace(by.k, words=by.k.words + 1),
            replace(by.k, words=by.k.words - 1),
            replace(by.k, table_bytes=by.k.table_bytes - 1),
            replace(by.k, table_bytes=0, words=0),
            replace(by.k, symbols=by.k.symbols - 1),
            replace(by.k, symbols=255),
            replace(by.k, first=-127),
            replace(by.k, half=1),
        ]
        return [replace(by, k=side) for side in sides]

    def sparse(by: SparseParameters) -> list[Parameters | None]:
        return [replace(by, kept=by.kept + 1), replace(by, block=1), replace(by, block=2**31 - 1)]

    table: dict[CodecName, Callable[..., list[Parameters | None]]] = {
        "k8v4": grouped,
        "k4v4": grouped,
        "cachegen": binned,
        "sparse": sparse,
    }
    wrong_kind: list[Parameters | None] = [
        None,
        GroupedParameters(8, 4, 64),
        SparseParameters(16, 3),
    ]
    for name, forge in table.items():
        codec, encoded, shape = encode(name, CODED)
        by = encoded.header.parameters
        others = [p for p in wrong_kind if type(p) is not type(by)]
        for parameters in [*forge(by), *others]:
            forged = reseal(encoded, bytes(encoded.payload), parameters)
            refused(codec, forged.pack(), shape)


def test_forged_code_longer_than_its_symbols_is_refused() -> None:
    """An entropy decoder reads any words; only what is left over tells that they were wrong."""
    codec, encoded, shape = encode("cachegen", CODED)
    by = encoded.header.parameters
    assert isinstance(by, BinnedParameters) and by.v.words
    longer = replace(by, v=replace(by.v, words=by.v.words + 1))
    forged = reseal(encoded, bytes(encoded.payload) + b"\1\2\3\4", longer)
    assert "does not fit its table" in refused(codec, forged.pack(), shape)


def test_format_of_version_1_stays() -> None:
    """Stores hold these bytes across releases: a change needs a new version.

    Left out are `cachegen`, whose table zlib deflates as its build likes, and `sparse`, whose
    choice rests on sums in the order of the machine.
    """
    k = (torch.arange(40 * 2 * 6).view(40, 2, 6) * 37 % 101 - 50).to(torch.bfloat16) / 8
    v = (torch.arange(40 * 2 * 3).view(40, 2, 3) * 53 % 89 - 44).to(torch.bfloat16) / 16
    digests = {
        name: hashlib.blake2b(make_codec(name, LAYOUT).encode(k, v, 3).pack(), digest_size=8)
        for name in ("none", "int8", "k8v4", "k4v4")
    }
    assert {name: digest.hexdigest() for name, digest in digests.items()} == {
        "none": "661cc722c35068b3",
        "int8": "a3dbe333f379bd9a",
        "k8v4": "4ed351dd02129d55",
        "k4v4": "377df4aacac9077a",
    }
