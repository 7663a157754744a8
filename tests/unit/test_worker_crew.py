"""Cores of workers that have nothing to do: who may use them, and when they are given back."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from shared.worker.core_board import CoreBoard
from shared.worker.cores import Share, share_of_machine
from shared.worker.crew import Crew

SHARES = (Share((0, 1), 2), Share((2, 3), 2), Share((3, 4), 2))


OPEN: list[CoreBoard] = []


@pytest.fixture(autouse=True)
def _close() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()


def board(folder: Path, index: int, shares: Sequence[Share] = SHARES) -> CoreBoard:
    OPEN.append(CoreBoard(folder, index, shares))
    return OPEN[-1]


def test_a_worker_that_was_never_heard_of_lends_nothing(tmp_path: Path) -> None:
    """It may run on another machine, or in a container with another folder: its cores are ours."""
    assert board(tmp_path, 0).idle_cores() == ()


def test_cores_are_lent_while_all_that_share_them_are_idle(tmp_path: Path) -> None:
    first, second, third = (board(tmp_path, index) for index in range(3))
    assert first.idle_cores() == (2, 3, 4)
    third.mark("busy")
    assert first.idle_cores() == (2,)
    third.mark("idle")
    second.mark("busy")
    assert first.idle_cores() == (4,)
    assert third.idle_cores() == (0, 1)


def test_a_worker_does_not_borrow_its_own_cores(tmp_path: Path) -> None:
    """Shares overlap where cores are few: two threads on one core only wait for each other."""
    _, second, third = (board(tmp_path, index) for index in range(3))
    assert second.idle_cores() == (0, 1, 4)
    assert third.idle_cores() == (0, 1, 2)


def test_one_thread_of_each_physical_core_is_lent(tmp_path: Path) -> None:
    shares = (Share((0, 4), 1), Share((1, 5), 1))
    mine, _ = board(tmp_path, 0, shares), board(tmp_path, 1, shares)
    assert mine.idle_cores() == (1,)


def test_a_worker_that_ended_while_it_computed_counts_as_idle(tmp_path: Path) -> None:
    first, second = board(tmp_path, 0), board(tmp_path, 1)
    second.mark("busy")
    second.close()
    second.close()
    assert first.idle_cores() == (2, 3)


def test_a_link_is_not_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The folder is the user's alone, but a link there may lead to a file that others can write."""
    (tmp_path / "elsewhere").touch()
    (tmp_path / "cores-3").symlink_to(tmp_path / "elsewhere")
    mine = board(tmp_path, 0)
    mine.mark("busy")
    assert (tmp_path / "elsewhere").read_bytes() == b""
    assert mine.idle_cores() == ()
    assert caplog.text.count("neither lent nor borrowed") == 1


def test_a_file_cut_short_ends_nobody(tmp_path: Path) -> None:
    """Mapped, it ended the process without a word."""
    first, second = board(tmp_path, 0), board(tmp_path, 1)
    os.truncate(tmp_path / "cores-3", 0)
    assert first.idle_cores() == ()
    first.mark("idle")
    second.refresh()
    assert first.idle_cores() == (2, 3)


def test_a_file_that_was_removed_is_found_again(tmp_path: Path) -> None:
    """A worker that came later has another file: each would take the other for idle for ever."""
    first = board(tmp_path, 0)
    (tmp_path / "cores-3").unlink()
    second = board(tmp_path, 1)
    second.mark("busy")
    first.refresh()
    assert first.idle_cores() == () and second.idle_cores() == (0, 1)
    second.mark("idle")
    assert first.idle_cores() == (2, 3)


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_what_is_no_file_is_borne(tmp_path: Path, kind: str) -> None:
    """A worker must not fail to start for the sake of a borrowed core."""
    place = tmp_path / "cores-3"
    place.mkdir() if kind == "folder" else os.mkfifo(place)
    mine = board(tmp_path, 0)
    mine.mark("busy")
    assert mine.idle_cores() == ()


def test_adjacent_hardware_threads_are_not_taken_for_cores(tmp_path: Path) -> None:
    """Numbered 0,1 2,3 as many virtual machines have it: two threads on one core are one."""
    groups = [(cpu, cpu + 1) for cpu in range(0, 8, 2)]
    shares = [share_of_machine(groups, index, 2) for index in range(2)]
    mine, _ = board(tmp_path, 0, shares), board(tmp_path, 1, shares)
    assert mine.idle_cores() == (4, 6)


class Threads:
    """Notes how threads were placed."""

    def __init__(self, *forbidden: int) -> None:
        self.placed: list[tuple[int, tuple[int, ...]]] = []
        self._forbidden = set(forbidden)

    def place(self, own: int, cpus: tuple[int, ...]) -> bool:
        if self._forbidden & set(cpus):
            return False
        self.placed.append((own, cpus))
        return True


def test_threads_change_only_when_idle_cores_do(tmp_path: Path) -> None:
    """Starting and stopping threads takes longer than a short step."""
    mine, other = board(tmp_path, 0), board(tmp_path, 1)
    threads = Threads()
    crew = Crew(2, 8, mine, threads.place)
    assert [crew.gather() for _ in range(3)] == [2, 2, 2]
    other.mark("busy")
    assert [crew.gather() for _ in range(2)] == [0, 0]
    assert threads.placed == [(2, (2, 3)), (2, ())]


def test_no_more_threads_than_have_work(tmp_path: Path) -> None:
    mine, _ = board(tmp_path, 0), board(tmp_path, 1)
    threads = Threads()
    assert Crew(2, 3, mine, threads.place).gather() == 1
    assert Crew(2, 2, mine, threads.place).gather() == 0
    assert threads.placed == [(2, (2,))]


def test_a_core_that_cannot_be_had_costs_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A container's cpuset may hold some of the cores: steps go on with those."""
    mine, _ = board(tmp_path, 0), board(tmp_path, 1)
    threads = Threads(3)
    crew = Crew(2, 8, mine, threads.place)
    assert [crew.gather() for _ in range(3)] == [1, 1, 1]
    assert threads.placed[-1] == (2, (2,))
    assert caplog.text.count("not borrowed") == 1
    none = Crew(2, 8, mine, Threads(2, 3).place)
    assert [none.gather() for _ in range(2)] == [0, 0]


def test_others_see_whether_there_is_a_step(tmp_path: Path) -> None:
    mine, other = board(tmp_path, 0), board(tmp_path, 1)
    crew = Crew(2, 8, mine, Threads().place)
    crew.busy()
    assert other.idle_cores() == ()
    crew.rest()
    assert other.idle_cores() == (0, 1)
