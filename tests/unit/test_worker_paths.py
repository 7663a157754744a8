"""Which path a pair takes: agreed, tested, named, and never another one in silence."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from shared.config import SecuritySection
from shared.errors import DiptychError, TransferFailed
from shared.ids import HostId, Incarnation, WorkerId
from shared.kv.arena import KvArena
from shared.kv.codecs.registry import CODEC_NAMES
from shared.kv.layout import KvLayout, LayerKv
from shared.messages.fleet import CodecRule, PathReason, PathRule
from shared.messages.prefill_decode import CudaDescriptor, NixlDescriptor
from shared.transport.bulk.fetches import FetchLimits
from shared.transport.bulk.nixl import Piece
from shared.transport.bulk.reader import ReaderLimits
from shared.transport.bulk.server import HostServer
from shared.worker.effects import Copy, MapArena
from shared.worker.events import Copied, CopyFailed, Event, PathChosen, SourceKey, SourceLost
from shared.worker.movers import Extras, Movers
from shared.worker.pairs import Pairs
from shared.worker.paths import (
    KNOWN_CODECS,
    Choice,
    CodecTerms,
    agree,
    agree_codec,
    choose,
    memory_apart,
)

LAYOUT = KvLayout(dtype="bf16", block_size=4, layers=(LayerKv(2, 8, 8), LayerKv(2, 8, 8)))
SOURCE = SourceKey(WorkerId("prefill-0"), Incarnation(7))
HERE = HostId("here")
BULK = "tcp://10.0.0.1:7401"


@pytest.mark.parametrize(
    ("mine", "theirs", "agreed"),
    [
        ("auto", "auto", "auto"),
        ("auto", "ipc", "ipc"),
        ("host", "auto", "host"),
        ("ipc", "ipc", "ipc"),
        ("ipc", "host", None),
        ("host", "ipc", None),
        ("nixl", "auto", "nixl"),
        ("nixl", "nixl", "nixl"),
        ("nixl", "ipc", None),
        ("host", "nixl", None),
    ],
)
def test_what_two_rules_agree_on(mine: PathRule, theirs: PathRule, agreed: PathRule | None) -> None:
    assert agree(mine, theirs) == agreed


@pytest.mark.parametrize(
    ("rule", "same_host", "bulk", "choice"),
    [
        ("auto", True, BULK, Choice("ipc", "self_test", fallback=True)),
        ("auto", True, None, Choice("ipc", "self_test")),
        ("auto", False, BULK, Choice("host", "other_host")),
        ("ipc", True, BULK, Choice("ipc", "configured")),
        ("host", True, BULK, Choice("host", "configured")),
        ("ipc", False, BULK, "needs one host"),
        ("host", True, None, "offers no endpoint"),
        ("auto", False, None, "offers no endpoint"),
    ],
)
def test_what_is_tried(
    rule: PathRule, same_host: bool, bulk: str | None, choice: Choice | str
) -> None:
    """Guards peers taken for local because of their address (42), and silent fallbacks."""
    made = choose(rule, same_host=same_host, bulk=bulk)
    if isinstance(choice, str):
        assert isinstance(made, DiptychError) and choice in made.message
    else:
        assert made == choice


def gpu(**changes: object) -> CudaDescriptor:
    cuda = CudaDescriptor(unit="u", size=1, layout="l", handle=bytes(64))
    return msgspec.structs.replace(cuda, **changes)


@pytest.mark.parametrize(
    ("mine", "theirs", "reason"),
    [
        (None, None, None),
        (gpu(), gpu(unit="v"), None),
        (gpu(), None, "mixed_memory"),
        (None, gpu(sliced=True), "mixed_memory"),
        (gpu(sliced=True), gpu(), "mig"),
        (gpu(), gpu(sliced=True, handle=None), "mig"),
        (gpu(), gpu(handle=None), "cannot_map"),
        (gpu(handle=None), gpu(), None),
    ],
)
def test_which_memory_is_not_mapped_even_on_one_host(
    mine: CudaDescriptor | None, theirs: CudaDescriptor | None, reason: PathReason | None
) -> None:
    """Guards an attempt that can only fail, and a reason that names something else."""
    assert memory_apart(mine, theirs) == reason
    made = choose("auto", same_host=True, bulk=BULK, apart=reason)
    expected = Choice("ipc", "self_test", fallback=True)
    assert made == (Choice("host", reason) if reason else expected)
    assert choose("auto", same_host=False, bulk=BULK, apart=reason) == Choice("host", "other_host")
    assert choose("host", same_host=True, bulk=BULK, apart=reason) == Choice("host", "configured")
    if reason:
        refused = choose("ipc", same_host=True, bulk=BULK, apart=reason)
        assert isinstance(refused, DiptychError) and "does not work here" in refused.message


@pytest.mark.parametrize(
    ("both", "bulk", "choice"),
    [
        (True, BULK, Choice("nixl", "configured", fallback=True)),
        (True, None, Choice("nixl", "configured")),
        (False, BULK, Choice("host", "nixl_missing")),
        (False, None, "offers no endpoint"),
    ],
)
@pytest.mark.parametrize("same_host", [True, False])
def test_nixl_is_used_where_both_sides_have_it(
    both: bool, bulk: str | None, choice: Choice | str, same_host: bool
) -> None:
    """Guards a missing extra against an error, and its absence against silence (46)."""
    made = choose("nixl", same_host=same_host, bulk=bulk, nixl=both)
    if isinstance(choice, str):
        assert isinstance(made, DiptychError) and choice in made.message
    else:
        assert made == choice


class NoReads:
    """A NIXL that starts and then cannot reach anybody."""

    staging = np.zeros(1, dtype=np.uint8)

    def meet(self, peer: NixlDescriptor) -> None:
        raise TransferFailed("NIXL does not know the way")

    def forget(self, peer: NixlDescriptor) -> None:
        raise AssertionError("nobody was met")

    def read(self, peer: NixlDescriptor, pieces: Sequence[Piece], seconds: float) -> None:
        raise AssertionError("nobody was met")


class Stage:
    """Movers on the loop, a source's pool, and what is posted."""

    def __init__(self, directory: Path) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.source = KvArena.create(LAYOUT, 8)
        self.target = KvArena.create(LAYOUT, 8)
        for part in (*self.source.raw(0), *self.source.raw(1)):
            part[:] = 7
        self.server = HostServer(
            self.context, f"ipc://{directory}/bulk.sock", self.source, worker="prefill-0"
        )
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.movers = Movers(
            self.target,
            self.events.put_nowait,
            host=HERE,
            identity=b"decode-0#1",
            security=SecuritySection(),
            limits=ReaderLimits(probe=0.5, fetch=FetchLimits(stall=0.1)),
            extras=Extras(nixl=NoReads()),
        )

    def open(self, **changes: object) -> None:
        effect = MapArena(
            *(SOURCE, self.source.descriptor(), HERE, self.server.endpoint, "auto", CodecTerms())
        )
        self.movers.open(msgspec.structs.replace(effect, **changes))

    def copy(self, job: int) -> None:
        self.movers.copy(
            Copy(
                job=job,
                source=SOURCE,
                first_layer=0,
                end_layer=2,
                source_blocks=(1, 2),
                generations=(0, 0),
                target_blocks=(4, 5),  # type: ignore[arg-type]
            )
        )

    async def next(self) -> Event:
        async with asyncio.timeout(20):
            return await self.events.get()

    def close(self) -> None:
        self.movers.close()
        self.server.close()
        self.context.term()
        self.source.close()
        self.target.close()


def staged(
    run_async: Callable[..., None],
    directory: Path,
    test: Callable[[Stage], Coroutine[object, object, None]],
) -> None:
    async def play() -> None:
        stage = Stage(directory)
        try:
            await test(stage)
        finally:
            stage.close()

    run_async(play())


def test_shared_memory_that_cannot_be_mapped_falls_back_by_name(
    run_async: Callable[..., None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards jobs that wait for a path for ever, and a fallback nobody hears of (72, 73)."""

    async def check(stage: Stage) -> None:
        wrong = msgspec.structs.replace(stage.source.descriptor(), fd=0)
        stage.open(arena=wrong)
        stage.copy(1)
        assert await stage.next() == PathChosen(SOURCE, "host", "cannot_map", "configured")
        assert isinstance(await stage.next(), Copied)
        assert (stage.target.raw(1)[1][4:6] == 7).all()

    staged(run_async, tmp_path, check)
    assert "KV comes by host" in caplog.text


def test_nixl_that_cannot_reach_a_source_falls_back_by_name(
    run_async: Callable[..., None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards jobs that wait for a path for ever, and a fallback nobody hears of (46, 72)."""

    async def check(stage: Stage) -> None:
        nixl = NixlDescriptor(agent="p#7", metadata=b"", address=1)
        stage.open(path="nixl", nixl=nixl)
        stage.copy(1)
        assert await stage.next() == PathChosen(SOURCE, "host", "nixl_failed", "configured")
        assert isinstance(await stage.next(), Copied)
        assert (stage.target.raw(1)[1][4:6] == 7).all()

    staged(run_async, tmp_path, check)
    assert "does not know the way; KV comes by host" in caplog.text


def test_a_self_test_that_passes_uses_shared_memory(
    run_async: Callable[..., None], tmp_path: Path
) -> None:
    async def check(stage: Stage) -> None:
        stage.open()
        stage.copy(1)
        assert await stage.next() == PathChosen(SOURCE, "ipc", "self_test")
        assert isinstance(await stage.next(), Copied)

    staged(run_async, tmp_path, check)


def test_no_path_at_all_is_a_lost_source(run_async: Callable[..., None], tmp_path: Path) -> None:
    """Guards ``ipc`` asked for by name against a fallback, and peers that answer nothing."""

    async def check(stage: Stage) -> None:
        wrong = msgspec.structs.replace(stage.source.descriptor(), fd=0)
        stage.open(arena=wrong, path="ipc")
        lost = await stage.next()
        assert isinstance(lost, SourceLost) and "cannot open" in lost.error.message
        stage.movers.close_source(SOURCE)
        stage.open(host=HostId("elsewhere"), bulk="tcp://127.0.0.1:9")
        stage.copy(2)
        lost = await stage.next()
        assert isinstance(lost, SourceLost) and "did not answer the self-test" in lost.error.message
        stage.movers.close_source(SOURCE)
        failed = await stage.next()
        assert isinstance(failed, CopyFailed) and failed.job == 2

    staged(run_async, tmp_path, check)


def _source(number: int) -> SourceKey:
    return SourceKey(WorkerId(f"prefill-{number}"), Incarnation(3))


def test_pairs_are_bounded_and_add_up() -> None:
    pairs = Pairs()
    for number in range(300):
        pairs.chosen(PathChosen(_source(number), "host", "other_host"))
        pairs.failed(_source(number))
    last = _source(299)
    pairs.chosen(PathChosen(last, "host", "other_host", "planned"))
    pairs.copied(last, Copied(1, 100, 0.5, 2, wire_bytes=100, codec="none"))
    pairs.copied(last, Copied(2, 50, 0.25, 0, wire_bytes=25, codec="int8"))
    pairs.arrived(last, 0.125)
    lines = pairs.snapshot()
    assert len(lines) == 256
    line = lines[-1]
    assert (line.path, line.reason, line.transfers, line.failed) == ("host", "other_host", 1, 1)
    assert (line.bytes, line.seconds, line.visible_seconds, line.chunks_again) == (
        *(150, 0.75, 0.125),
        2,
    )
    assert (line.codec, line.codec_reason, line.wire_bytes) == ("int8", "planned", 125)


@pytest.mark.parametrize(
    ("mine", "theirs", "known", "terms"),
    [
        ("none", "none", KNOWN_CODECS, CodecTerms()),
        ("int8", "int8", KNOWN_CODECS, CodecTerms("int8", "configured")),
        ("int8", "auto", KNOWN_CODECS, CodecTerms("int8", "configured")),
        ("auto", "k4v4", KNOWN_CODECS, CodecTerms("k4v4", "configured")),
        ("auto", "auto", KNOWN_CODECS, CodecTerms("auto", "planned")),
        ("int8", "none", KNOWN_CODECS, CodecTerms("none", "declined")),
        ("none", "int8", KNOWN_CODECS, CodecTerms("none", "declined")),
        ("int8", "none", (), CodecTerms("none", "unknown")),
        ("auto", "auto", (), CodecTerms("none", "unknown")),
        ("auto", "later", ("later",), CodecTerms("none", "unknown")),
        ("int8", "int8", ("k4v4",), CodecTerms("none", "unknown")),
        ("int8", "k4v4", KNOWN_CODECS, None),
        ("int8", "later", ("later",), None),
    ],
)
def test_what_codec_two_sides_agree_on(
    mine: CodecRule, theirs: str, known: tuple[str, ...], terms: CodecTerms | None
) -> None:
    """Guards a loss that one side did not ask for, and bytes that one side cannot read (45)."""
    assert agree_codec(mine, theirs, known) == terms


def test_every_codec_can_be_named_in_the_deployment_file() -> None:
    assert KNOWN_CODECS == CODEC_NAMES


def test_shared_memory_is_never_encoded(run_async: Callable[..., None], tmp_path: Path) -> None:
    """Guards a loss for nothing: over shared memory no byte travels."""

    async def check(stage: Stage) -> None:
        stage.open(terms=CodecTerms("int8", "configured"))
        stage.copy(1)
        assert await stage.next() == PathChosen(SOURCE, "ipc", "self_test", "shared_memory")
        copied = await stage.next()
        assert isinstance(copied, Copied) and (copied.codec, copied.wire_bytes) == ("none", 0)

    staged(run_async, tmp_path, check)
