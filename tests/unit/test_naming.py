"""Replicas of one container name themselves: unique, stable, free again after any death."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from shared.config import Deployment, WorkerSection, WorkersSection
from shared.errors import BadConfig, ResourceMissing
from shared.naming import MAX_REPLICAS, worker_name
from shared.runtime import host_id, worker_ids
from shared.worker.settings import worker_settings

REPO = Path(__file__).resolve().parents[2]
DECODE = ("decode", "mixed")


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    yield Deployment(
        name="d",
        deployment_type="split",
        workers=WorkersSection(prefill=WorkerSection(), decode=WorkerSection()),
        runtime_dir=str(tmp_path / "run"),
    )


def test_replicas_get_different_names_beyond_the_configured_count(deployment: Deployment) -> None:
    with ExitStack() as held:
        found = [held.enter_context(worker_name(deployment, "auto", DECODE)) for _ in range(3)]
        names = [name for _, name in found]
        assert names == ["decode-0", "decode-1", "decode-2"]
        assert worker_settings(found[2][0], names[2], DECODE).worker == "decode-2"
        assert ("decode-2", "decode") in worker_ids(found[2][0])
        with worker_name(deployment, "auto", ("prefill",)) as (_, name):
            assert name == "prefill-0", "each role counts for itself"


def test_a_given_name_stays_and_takes_nothing(deployment: Deployment, tmp_path: Path) -> None:
    for given in (None, "decode-7"):
        with worker_name(deployment, given, DECODE) as (same, name):
            assert (same, name) == (deployment, given)
    assert not (tmp_path / "run").exists()


def test_the_name_of_a_killed_process_is_free_at_once(deployment: Deployment) -> None:
    """A replica killed with -9 must not cost a name, else metrics grow a label per crash."""
    script = (
        "import sys\n"
        "from shared.config import *\n"
        "from shared.naming import worker_name\n"
        "d = Deployment(name='d', deployment_type='split', runtime_dir=sys.argv[1],\n"
        "  workers=WorkersSection(prefill=WorkerSection(), decode=WorkerSection()))\n"
        "with worker_name(d, 'auto', ('decode',)) as (_, name):\n"
        "    print(name, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(deployment.runtime_dir)],
        cwd=REPO,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"decode-0\n"
        with worker_name(deployment, "auto", DECODE) as (_, name):
            assert name == "decode-1"
        child.kill()
    with worker_name(deployment, "auto", DECODE) as (_, name):
        assert name == "decode-0"


def test_no_end_of_names_and_no_role_are_said(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.naming.MAX_REPLICAS", 1)
    taken = pytest.raises(ResourceMissing, match="all 1 names of decode workers are taken")
    with worker_name(deployment, "auto", DECODE), taken:
        worker_name(deployment, "auto", DECODE).__enter__()
    with pytest.raises(BadConfig, match="has no mixed worker"):
        worker_name(deployment, "auto", ("mixed",)).__enter__()
    assert MAX_REPLICAS > 1


def test_a_run_directory_that_cannot_be_is_a_sentence(deployment: Deployment) -> None:
    Path(str(deployment.runtime_dir)).write_text("a file")
    with pytest.raises(ResourceMissing, match="cannot take a name in"):
        worker_name(deployment, "auto", DECODE).__enter__()


def test_host_names_do_not_tell_hosts_apart() -> None:
    """Containers that share a pid namespace share memory, whatever their host names are."""
    parts = host_id().split(":")
    assert len(parts) == 3
    assert os.uname().nodename not in parts
    assert parts[1] == str(os.stat("/proc/self/ns/pid").st_ino)
