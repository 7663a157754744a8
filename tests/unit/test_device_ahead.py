"""A GPU's chunks are copied one ahead of the wire, and trusted in the same order as ever."""

import threading
from collections.abc import Callable
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from shared.device.cuda_pool import CudaPool
from shared.transport.bulk import server
from shared.worker.events import Copied, CopyFailed, PathChosen
from tests.unit.device_pair import Pair, paired

RunAsync = Callable[..., None]


def test_chunks_are_copied_one_ahead_and_checked_in_order(
    run_async: RunAsync, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Event, checksum, generations: of each chunk in this order, with the next one's copy queued
    before. Guards a sender that trusts a slab too soon, and one whose wire waits for every copy."""
    log: list[str] = []

    def noted(name: str, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            if threading.current_thread().name == "kv-server":
                log.append(name)
            return function(*arguments)

        return call

    async def check(pair: Pair) -> None:
        pair.open(path="host")
        assert isinstance(await pair.next(), PathChosen)
        for name, call in (("copy", "memcpyAsync"), ("event", "eventQuery")):
            monkeypatch.setattr(pair.theirs, call, noted(name, getattr(pair.theirs, call)))
        monkeypatch.setattr(server, "checksum", noted("checksum", server.checksum))
        read = noted("generations", CudaPool.generations.fget)
        monkeypatch.setattr(CudaPool, "generations", property(read))
        pair.copy(1)
        assert isinstance(await pair.next(), Copied)
        assert pair.arrived()

    paired(run_async, partial(Pair, tmp_path, slabs=4), check)
    steps = [name for name, _ in groupby(log)]
    chunks = steps.count("checksum")
    assert chunks > 2
    checked = ["event", "checksum", "generations"]
    assert steps == ["copy", *checked] * (chunks - 1) + checked


def test_blocks_used_anew_are_refused_once_with_a_chunk_ahead(
    run_async: RunAsync, tmp_path: Path
) -> None:
    """Guards a chunk sent, or refused again, for a job that is over."""

    async def check(pair: Pair) -> None:
        pair.open(path="host")
        assert isinstance(await pair.next(), PathChosen)
        pair.copy(1, generation=3)
        failed = await pair.next()
        assert isinstance(failed, CopyFailed) and failed.reused == 3
        pair.copy(2)
        assert isinstance(await pair.next(), Copied)
        assert pair.server.stats.refused == 1

    paired(run_async, partial(Pair, tmp_path, slabs=4), check)
