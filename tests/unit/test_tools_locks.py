"""Locks tell the truth about who runs, and cleaning takes only what a run makes."""

import fcntl
import os
from pathlib import Path

import pytest

from shared.errors import ResourceMissing
from tools.supervise.locks import Owner, UpLock, clean, holders, read_owner, wait_for_services
from tools.supervise.plan import RunPaths

OWNER = Owner(pid=os.getpid(), config="/x.yaml")


def test_a_held_lock_names_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "up.lock"
    assert read_owner(path) is None
    lock = UpLock.acquire(path, OWNER, "x")
    assert read_owner(path) == OWNER
    with pytest.raises(ResourceMissing, match=f"`x` is already run by pid {os.getpid()}"):
        UpLock.acquire(path, OWNER, "x")
    lock.release()
    assert not path.exists()
    assert read_owner(path) is None


def test_a_file_left_by_a_killed_run_is_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "up.lock"
    path.write_text('{"pid": 1, "config": "/old.yaml"}')
    assert read_owner(path) is None
    lock = UpLock.acquire(path, OWNER, "x")
    assert read_owner(path) == OWNER
    lock.release()


def test_holders_are_the_processes_with_the_file_open(tmp_path: Path) -> None:
    path = tmp_path / "services.lock"
    assert holders(path) == []
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        assert holders(path) == [os.getpid()]
    finally:
        os.close(fd)
    assert holders(path) == []


def test_waiting_for_services_ends_at_its_deadline(tmp_path: Path) -> None:
    paths = RunPaths(root=tmp_path)
    assert wait_for_services(paths, 0.0)
    fd = os.open(paths.services_lock, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        assert not wait_for_services(paths, 0.0)
    finally:
        os.close(fd)
    assert wait_for_services(paths, 0.0)


def test_cleaning_keeps_logs_and_strangers(tmp_path: Path) -> None:
    paths = RunPaths(root=tmp_path)
    paths.logs.mkdir()
    paths.log("router").write_text("kept")
    (tmp_path / "notes.txt").write_text("kept")
    for name in ("client.sock", "router.ready", "router.ready.17", "supervisor.conf"):
        (tmp_path / name).touch()
    clean(paths)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["logs", "notes.txt"]
    assert paths.log("router").exists()
