"""The doctor says which namespace or permission keeps workers from sharing KV."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from shared.config import Deployment
from tools.doctor.peers import check_peers

HOLD = (
    "import os, sys\n"
    "fd = os.memfd_create('diptych-kv')\n"
    "print('up', flush=True)\n"
    "sys.stdin.read()\n"
)


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    tree = {
        "name": "t",
        "deployment_type": "split",
        "workers": {"prefill": {}, "decode": {}},
        "transfer": {"path": "ipc"},
        "runtime_dir": str(tmp_path),
    }
    return msgspec.convert(tree, Deployment)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[int]:
    """A process that looks like prefill-0 and holds a memory file."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, "-m", "services.prefill"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        (tmp_path / "prefill-0.ready").write_text(json.dumps({"pid": child.pid}))
        yield child.pid
        child.kill()


def levels(deployment: Deployment, proc: Path = Path("/proc")) -> list[tuple[str, str]]:
    return [(finding.level, finding.text) for finding in check_peers(deployment, proc)]


def test_nothing_runs_nothing_is_said(deployment: Deployment) -> None:
    assert levels(deployment) == []


@pytest.mark.usefixtures("worker")
def test_memory_that_can_be_opened_is_good_news(deployment: Deployment) -> None:
    assert levels(deployment) == [("ok", "the memory of prefill-0 can be opened")]


def test_a_process_of_another_pid_namespace_is_explained(
    deployment: Deployment, worker: int, tmp_path: Path
) -> None:
    """The pid of the ready file is nobody's here, or someone else's."""
    (tmp_path / "proc").mkdir()
    for _ in range(2):
        [(level, text)] = levels(deployment, tmp_path / "proc")
        assert level == "fail"
        assert "`pid: service:anchor`" in text
        other = tmp_path / "proc" / str(worker)
        other.mkdir(exist_ok=True)
        (other / "cmdline").write_bytes(b"python\0-m\0services.decode\0")


def test_memory_that_may_not_be_opened_is_explained(
    deployment: Deployment, worker: int, tmp_path: Path
) -> None:
    place = tmp_path / "proc" / str(worker)
    place.mkdir(parents=True)
    (place / "cmdline").write_bytes(Path(f"/proc/{worker}/cmdline").read_bytes())
    [(level, text)] = levels(deployment, tmp_path / "proc")
    assert (level, "the same user" in text) == ("fail", True), text
    (place / "fd").mkdir()
    (place / "fd" / "3").symlink_to("/memfd:diptych-kv (deleted)")
    [(level, text)] = levels(deployment, tmp_path / "proc")
    assert level == "ok" or "SELinux" in text or "holds no KV" in text
    assert os.path.islink(place / "fd" / "3")
