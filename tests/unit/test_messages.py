"""The wire: every message survives it, old bytes stay readable, garbage is refused."""

import json
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import DiptychError, ErrorPayload
from shared.kv.layout import KvLayout, LayerKv
from shared.messages.hello import Compatibility
from tests.unit.message_samples import GOLDEN, LINKS, as_json, members, sample

ENTRIES: dict[str, dict[str, Any]] = json.loads(GOLDEN.read_text())
CASES = [(link, message) for link in LINKS for message in members(link)]


def _decoder(link: str) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(LINKS[link])


@pytest.mark.parametrize(("link", "message"), CASES, ids=lambda x: getattr(x, "__name__", x))
@pytest.mark.parametrize("full", [True, False], ids=["full", "minimal"])
def test_every_message_round_trips(link: str, message: type[msgspec.Struct], full: bool) -> None:
    """Guards fields that encode but do not decode (types msgspec reads differently)."""
    made = sample(message, full=full)
    back = _decoder(link).decode(msgspec.msgpack.encode(made))
    assert type(back) is message
    assert back == made


@pytest.mark.parametrize(("link", "message"), CASES, ids=lambda x: getattr(x, "__name__", x))
def test_messages_are_values(link: str, message: type[msgspec.Struct]) -> None:
    """Guards state machines: a message shared between effects must not change."""
    config = message.__struct_config__
    assert config.frozen and config.tag is not None


def test_tags_of_a_link_differ() -> None:
    """Guards against two messages of one link that look alike."""
    for link in LINKS:
        tags = [message.__struct_config__.tag for message in members(link)]
        assert len(set(tags)) == len(tags)


def _covers(now: object, then: object) -> bool:
    """True where ``now`` holds all of ``then``; new fields and appended items are fine."""
    if isinstance(then, dict):
        return isinstance(now, dict) and all(k in now and _covers(now[k], then[k]) for k in then)
    if isinstance(then, list):
        return (
            isinstance(now, list)
            and len(now) >= len(then)
            and all(_covers(a, b) for a, b in zip(now, then, strict=False))
        )
    return now == then


@pytest.mark.parametrize("name", ENTRIES)
def test_golden_bytes_keep_their_meaning(name: str) -> None:
    """Guards rolling upgrades: bytes of an earlier build decode to the same content."""
    entry = ENTRIES[name]
    message = _decoder(name.split()[0]).decode(bytes.fromhex(entry["bytes"]))
    assert type(message).__name__ == name.split()[1]
    assert _covers(as_json(message), entry["means"])


def test_every_message_has_golden_bytes() -> None:
    """Guards the file above against new messages that nobody recorded."""
    expected = {f"{link} {m.__name__} {kind}" for link, m in CASES for kind in ("full", "minimal")}
    assert expected <= set(ENTRIES), "run: python -m tests.unit.message_samples"


def _decode_or_refuse(link: str, frame: bytes) -> None:
    try:
        _decoder(link).decode(frame)
    except msgspec.MsgspecError:
        return


@pytest.mark.parametrize("link", LINKS)
def test_unknown_and_foreign_messages_are_refused(link: str) -> None:
    """Guards scenario 67: nothing but the link's own union is taken."""
    wrong: list[object] = [
        {"type": "no such message"},
        {"type": 5},
        {"type": None},
        {},
        {"no": "type"},
        [],
        "hello",
        b"hello",
        0,
        None,
        {1: 2},
    ]
    for content in wrong:
        with pytest.raises(msgspec.MsgspecError):
            _decoder(link).decode(msgspec.msgpack.encode(content))
    for frame in (b"", b"\xc1", b"\x81", b"\xdf\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff"):
        with pytest.raises(msgspec.MsgspecError):
            _decoder(link).decode(frame)


@pytest.mark.parametrize("name", ENTRIES)
def test_cut_and_flipped_frames_raise_msgspec_errors_only(name: str) -> None:
    """Guards the links, which catch just these: any other exception would kill a service."""
    link, frame = name.split()[0], bytes.fromhex(ENTRIES[name]["bytes"])
    for end in range(len(frame)):
        with pytest.raises(msgspec.MsgspecError):
            _decoder(link).decode(frame[:end])
    with pytest.raises(msgspec.MsgspecError):
        _decoder(link).decode(frame + b"\x00")
    rng = random.Random(name)
    for _ in range(300):
        mutated = bytearray(frame)
        for _ in range(rng.randint(1, 3)):
            mutated[rng.randrange(len(frame))] = rng.randrange(256)
        _decode_or_refuse(link, bytes(mutated))


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(LINKS)), st.binary(max_size=64))
def test_random_frames_raise_msgspec_errors_only(link: str, frame: bytes) -> None:
    """Guards the same against bytes that never were a message."""
    _decode_or_refuse(link, frame)


@pytest.mark.parametrize("link", LINKS)
def test_deep_nesting_is_an_error_not_a_crash(link: str) -> None:
    """Guards the C stack: ten million levels in an unknown field of a valid message.

    msgspec answers with RecursionError, which links must catch beside its own errors.
    """
    frame = b"\x82\xa1x" + b"\x91" * 10_000_000 + b"\xc0" + b"\xa4type\xa5hello"
    with pytest.raises((msgspec.MsgspecError, RecursionError)):
        _decoder(link).decode(frame)


def test_every_error_class_has_a_wire_form() -> None:
    """Guards the error tree: a code that is not in the union would fail at the peer."""
    tree = [c for c in DiptychError.__subclasses__() if c.__module__ == "shared.errors"]
    classes = [DiptychError, *tree]
    for made in classes:
        error = made("a sentence", param="p", retry_after=1.5)
        payload = error.payload()
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(payload), type=ErrorPayload) == payload
        assert (payload.message, payload.retryable) == (str(error), made.retryable)
    assert len({c.code for c in classes}) >= len(classes) - 1


def test_compatibility_names_every_difference() -> None:
    """Guards scenario 45: a refused peer must be told which fields differ."""
    base = Compatibility(model="m", kv_dtype="bf16", block_size=16, layout="l")
    assert base.differences(base) == []
    changes: dict[str, Any] = {
        "wire_version": 99,
        "model": "other",
        "kv_dtype": "fp8",
        "block_size": 32,
        "layout": "x",
        "tensor_parallel": 2,
    }
    assert {*changes, "layers"} == set(base.__struct_fields__)
    for field, value in changes.items():
        other = msgspec.structs.replace(base, **{field: value})
        (sentence,) = base.differences(other)
        assert sentence.startswith(f"{field}: ") and repr(value) in sentence
    for dtype in ("fp32", "fp16", "int8"):  # converted by the reader
        assert base.differences(msgspec.structs.replace(base, kv_dtype=dtype)) == []


def compatibility(block_size: int, *layers: LayerKv) -> Compatibility:
    """Return what a worker with such KV says at hello."""
    layout = KvLayout(dtype="bf16", block_size=block_size, layers=layers)
    return Compatibility(
        model="m",
        kv_dtype="bf16",
        block_size=block_size,
        layout=layout.shape_fingerprint(),
        layers=layers,
    )


PLAIN, NARROW = LayerKv(2, 64, 64), LayerKv(2, 64, 64, window=512)


@pytest.mark.parametrize(
    ("there", "sentences"),
    [
        (compatibility(32, PLAIN, PLAIN, PLAIN), ["block_size: 16 here, 32 there"]),
        (compatibility(16, PLAIN, PLAIN), ["layers: 3 here, 2 there"]),
        (
            compatibility(16, PLAIN, NARROW, PLAIN),
            ["window: None here, 512 there (layer 1)"],
        ),
        (
            compatibility(16, LayerKv(4, 32, 64), PLAIN, LayerKv(4, 64, 64)),
            ["heads: 2 here, 4 there (layer 0 and 1 more)", "k_dim: 64 here, 32 there (layer 0)"],
        ),
        (
            compatibility(8, PLAIN, PLAIN, LayerKv(2, 64, 64, shares=0)),
            ["block_size: 16 here, 8 there", "shares: None here, 0 there (layer 2)"],
        ),
    ],
)
def test_compatibility_names_what_differs_in_the_layout(
    there: Compatibility, sentences: list[str]
) -> None:
    """Guards two hashes that tell an operator nothing (45)."""
    here = compatibility(16, PLAIN, PLAIN, PLAIN)
    assert here.differences(there) == sentences
    untold = msgspec.structs.replace(there, layers=())
    (sentence, *_) = here.differences(untold)
    assert sentence.startswith(("block_size: ", "layout: "))
    assert here.differences(msgspec.structs.replace(here, layers=())) == []
