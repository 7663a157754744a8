"""What a simulated link leaves behind when its processes are killed."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from shared.errors import ResourceMissing
from tools.slow_link.hosts import LARGE_MTU, slow_link
from tools.slow_link.relay import ip
from tools.slow_link.shaping import LinkProfile

SPACES = Path("/run/netns")


@pytest.fixture
def orphan() -> Iterator[Path]:
    """A namespace named for a process that has ended, as a killed bench leaves it."""
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    place = SPACES / f"dtp{ended.pid}"
    try:
        ip("netns", "add", place.name)
    except ResourceMissing as error:
        pytest.skip(error.message)
    yield place
    if place.exists():
        ip("netns", "del", place.name)


def test_the_next_link_removes_the_namespaces_of_the_dead(orphan: Path) -> None:
    """Guards namespaces that pile up until somebody looks."""
    try:
        with slow_link(LinkProfile(), LARGE_MTU) as hosts:
            assert not orphan.exists()
            assert (SPACES / hosts.space).exists()
    except ResourceMissing as error:
        pytest.skip(error.message)
    assert not (SPACES / hosts.space).exists()


def test_a_killed_relay_leaves_no_namespace() -> None:
    """Guards a namespace for each test whose link was killed under it."""
    try:
        with slow_link(LinkProfile(), LARGE_MTU) as hosts:
            for child in psutil.Process().children():
                if "tools.slow_link.relay" in child.cmdline():
                    child.send_signal(signal.SIGKILL)
    except ResourceMissing as error:
        pytest.skip(error.message)
    assert not (SPACES / hosts.space).exists()
