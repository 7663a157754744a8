"""Cores of workers that have nothing to do: who may use them, and when they are given back."""

from pathlib import Path

import pytest

from shared.worker.core_board import CoreBoard
from shared.worker.cores import Share
from shared.worker.crew import Crew

SHARES = (Share((0, 1), 2), Share((2, 3), 2), Share((3, 4), 2))


def board(folder: Path, index: int) -> CoreBoard:
    return CoreBoard(folder, index, SHARES)


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
    mine = CoreBoard(tmp_path, 0, shares)
    CoreBoard(tmp_path, 1, shares)
    assert mine.idle_cores() == (1,)


def test_a_worker_that_ended_while_it_computed_counts_as_idle(tmp_path: Path) -> None:
    first, second = board(tmp_path, 0), board(tmp_path, 1)
    second.mark("busy")
    second.close()
    second.close()
    assert first.idle_cores() == (2, 3)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    """The folder is the user's alone, but a link there may lead to a file that others can write."""
    (tmp_path / "elsewhere").touch()
    (tmp_path / "cores-3").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        board(tmp_path, 0)


class Threads:
    """Notes how threads were placed."""

    def __init__(self, allowed: bool = True) -> None:
        self.placed: list[tuple[int, tuple[int, ...]]] = []
        self._allowed = allowed

    def place(self, own: int, cpus: tuple[int, ...]) -> bool:
        self.placed.append((own, cpus))
        return self._allowed


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


def test_cores_that_cannot_be_had_are_asked_for_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A container's cpuset may hold this worker's cores alone: steps go on with those."""
    mine, _ = board(tmp_path, 0), board(tmp_path, 1)
    threads = Threads(allowed=False)
    crew = Crew(2, 8, mine, threads.place)
    assert [crew.gather() for _ in range(3)] == [0, 0, 0]
    assert len(threads.placed) == 1
    assert caplog.text.count("cannot be borrowed") == 1


def test_others_see_whether_there_is_a_step(tmp_path: Path) -> None:
    mine, other = board(tmp_path, 0), board(tmp_path, 1)
    crew = Crew(2, 8, mine, Threads().place)
    crew.busy()
    assert other.idle_cores() == ()
    crew.rest()
    assert other.idle_cores() == (0, 1)
