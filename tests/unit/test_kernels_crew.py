"""Threads that help on other cores: where they run, and that the caller stays where it was."""

import os
import subprocess
import sys

import pytest

from shared.kernels.load import native

_PROGRAM = """
import os, sys
import torch
from shared.kernels.ops import PackedLinear, place_threads
cpus = sorted(os.sched_getaffinity(0))
mine, others = cpus[0], tuple(cpus[1:2])
os.sched_setaffinity(0, {mine})
torch.set_num_threads(1)
linear = PackedLinear(torch.randn(256, 64), None, "bf16")
x = torch.randn(64, 64)
alone = linear(x)
def others_there():
    sets = [os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")]
    return sum(cpus == set(others) for cpus in sets)
assert others_there() == 0
assert place_threads(1, others)
assert torch.equal(linear(x), alone)
assert others_there() == 1 and torch.get_num_threads() == 2
assert os.sched_getaffinity(0) == {mine}
assert place_threads(1, ())
assert torch.get_num_threads() == 1
assert not place_threads(1, (100_000,)) and torch.get_num_threads() == 1
assert torch.equal(linear(x), alone)
print("right")
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="takes two CPUs")
def test_a_lent_core_gets_a_thread_and_nothing_else_moves() -> None:
    """In a process of its own, as torch's threads stay where they were put."""
    if not native():
        pytest.skip("no native kernels here")
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == "right", done.stderr
