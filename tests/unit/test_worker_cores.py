"""Shares of a machine's cores: even, apart, and no two workers on one core's hardware threads."""

from pathlib import Path

import pytest

from shared.worker import cores
from shared.worker.cores import (
    Share,
    Siblings,
    numa_nodes,
    one_of_each_first,
    parse_cpus,
    physical_cores,
    read_siblings,
    share_of_cores,
    share_of_machine,
    useful_threads,
    write_cpus,
)

FAR: Siblings = {cpu: (cpu % 4, cpu % 4 + 4) for cpu in range(8)}
"""Linux's usual order: the second hardware threads come after all first ones."""
NEAR: Siblings = {cpu: (cpu // 2 * 2, cpu // 2 * 2 + 1) for cpu in range(8)}


def shares(available: range, siblings: Siblings, count: int) -> list[Share]:
    groups = physical_cores(available, siblings)
    return [share_of_machine(groups, i, count) for i in range(count)]


@pytest.mark.parametrize("cpus", [8, 64])
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_every_core_is_somebodys_and_nobodys_twice(cpus: int, workers: int) -> None:
    parts = [share_of_cores(list(range(cpus)), i, workers) for i in range(workers)]
    assert sorted(cpu for part in parts for cpu in part) == list(range(cpus))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    alone = shares(range(cpus), {}, workers)
    assert [share.cores for share in alone] == parts
    assert [share.threads for share in alone] == [len(part) for part in parts]


@pytest.mark.parametrize("siblings", [FAR, NEAR])
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_no_core_is_shared_while_there_are_enough(siblings: Siblings, workers: int) -> None:
    """On 8 logical CPUs in Linux's order prefill had one half of every core, decode the other."""
    found = shares(range(8), siblings, workers)
    used = [{min(siblings[cpu]) for cpu in share.cores} for share in found]
    assert sum(map(len, used)) == 4
    assert len(set().union(*used)) == 4
    assert [share.threads for share in found] == [len(cores) for cores in used]
    assert sum(len(share.cores) for share in found) == 8, "the second threads serve sockets"


def test_sixty_four_cores_with_two_threads_each() -> None:
    siblings: Siblings = {cpu: (cpu % 64, cpu % 64 + 64) for cpu in range(128)}
    prefill, decode = shares(range(128), siblings, 2)
    assert (prefill.threads, decode.threads) == (32, 32)
    assert prefill.cores == (*range(32), *range(64, 96))
    assert decode.cores == (*range(32, 64), *range(96, 128))


def test_more_workers_than_cores_get_hardware_threads() -> None:
    """A small cloud machine is one core that looks like two."""
    one = {0: (0, 1), 1: (0, 1)}
    assert shares(range(2), one, 2) == [Share((0,), 1), Share((1,), 1)]
    assert shares(range(2), one, 1) == [Share((0, 1), 1)]
    six = shares(range(8), FAR, 6)
    assert [share.threads for share in six] == [1, 1, 2, 1, 1, 2]
    assert shares(range(2), one, 3)[2] == Share((0,), 1)


def test_cpus_that_are_not_ours_are_left_alone() -> None:
    """taskset and containers take CPUs away, also one of a pair."""
    assert physical_cores([1, 5, 6], FAR) == [(1, 5), (6,)]
    assert one_of_each_first([(1, 5), (6,)]) == [1, 6, 5]
    assert one_of_each_first([]) == []


def test_lists_of_cpus_are_read_as_linux_writes_them() -> None:
    assert parse_cpus("0-1\n") == (0, 1)
    assert parse_cpus("3,67") == (3, 67)
    assert parse_cpus("0-2,8-9") == (0, 1, 2, 8, 9)
    with pytest.raises(ValueError):
        parse_cpus("")


def test_what_linux_does_not_tell_is_a_core_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers without /sys must still get cores."""
    monkeypatch.setattr(cores, "_TOPOLOGY", str(tmp_path / "{}"))
    (tmp_path / "0").write_text("0,2\n")
    (tmp_path / "2").write_text("nonsense\n")
    assert read_siblings([0, 1, 2]) == {0: (0, 2), 1: (1,), 2: (2,)}


def test_threads_with_work_in_the_narrowest_layer() -> None:
    assert [useful_threads(hidden) for hidden in (1, 32, 33, 576, 4096)] == [1, 1, 2, 18, 128]


def test_a_list_of_cpus_is_written_as_linux_writes_it() -> None:
    for text in ("0", "0-3", "0-1,4,6-7"):
        assert write_cpus(parse_cpus(text)) == text
    assert write_cpus(()) == ""


def test_the_numa_nodes_of_a_share_are_those_of_its_cpus(tmp_path: Path) -> None:
    """Guards a log that names a node the worker is not on, and one without CPUs."""
    for node, cpus in (("node0", "0-3,8-11\n"), ("node1", "4-7\n"), ("node2", "\n")):
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(cpus)
    assert numa_nodes((5, 6), tmp_path) == (1,)
    assert numa_nodes((9, 4), tmp_path) == (0, 1)
    assert numa_nodes((0,), tmp_path / "none") == ()
