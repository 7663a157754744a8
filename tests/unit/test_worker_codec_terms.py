"""How two workers settle at hello what KV on the ``host`` path is encoded by."""

import msgspec
import pytest

from shared.messages.fleet import CodecReason, CodecRule
from shared.messages.prefill_decode import PeerHello, PeerRefused, PeerWelcome
from shared.worker.effects import MapArena
from shared.worker.paths import KNOWN_CODECS, CodecTerms
from tests.unit.worker_bench import ARENA, HELLO, IDENTITY, SOURCE, Bench, request


def bench_of(codec: CodecRule) -> Bench:
    return Bench(identity=msgspec.structs.replace(IDENTITY, codec=codec))


def answer(mine: CodecRule, hello: PeerHello) -> PeerWelcome | PeerRefused:
    """Return what a prefill worker of this configuration says to a reader."""
    bench = bench_of(mine)
    bench.reader(hello)
    (message,) = bench.to_reader()
    assert isinstance(message, PeerWelcome | PeerRefused)
    return message


def hello(codec: str, codecs: tuple[str, ...] = KNOWN_CODECS) -> PeerHello:
    return msgspec.structs.replace(HELLO, codec=codec, codecs=codecs)


def test_two_codecs_are_refused_by_name_at_hello() -> None:
    """Guards KV one side cannot read, found out at the first transfer only (17, 45)."""
    refused = answer("int8", hello("k4v4"))
    assert isinstance(refused, PeerRefused) and refused.error.code == "incompatible_peer"
    assert "transfer.codec: int8 here, k4v4 there" in refused.error.message


@pytest.mark.parametrize(
    ("mine", "theirs", "codec", "reason"),
    [
        ("int8", hello("int8"), "int8", "configured"),
        ("auto", hello("auto"), "auto", "planned"),
        ("int8", hello("none"), "none", "declined"),
        ("int8", HELLO, "none", "unknown"),  # a peer from before there were codecs
    ],
)
def test_the_welcome_says_what_was_agreed_and_why(
    mine: CodecRule, theirs: PeerHello, codec: str, reason: CodecReason
) -> None:
    welcome = answer(mine, theirs)
    assert isinstance(welcome, PeerWelcome)
    assert (welcome.codec, welcome.codec_reason) == (codec, reason)


def test_a_reader_says_what_it_knows_and_takes_no_codec_it_does_not() -> None:
    """Guards against a peer of a later version, and one from before there were codecs."""
    for told, terms in (
        ({"codec": "int8", "codec_reason": "configured"}, CodecTerms("int8", "configured")),
        ({"codec": "later", "codec_reason": "configured"}, CodecTerms("none", "unknown")),
        ({}, CodecTerms("none", "unknown")),
    ):
        bench = bench_of("int8")
        bench.expect(1, request(5))
        (said,) = [m for m in bench.to_source() if isinstance(m, PeerHello)]
        assert (said.codec, said.codecs) == ("int8", KNOWN_CODECS)
        welcome = PeerWelcome(
            worker=SOURCE.worker, incarnation=SOURCE.incarnation, arena=ARENA, **told
        )
        (effect,) = [e for e in bench.source(welcome) if isinstance(e, MapArena)]
        assert effect.terms == terms
