"""What router and gateway cost, read from outside."""

import os
import subprocess
import sys
import time

from tools.bench.cpu import cpu_seconds, own_cpu_seconds


def burn(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_less_than_a_tick_counts_and_all_processes_are_summed() -> None:
    """Guards a cost of none, told of a load that is over within 10 ms of CPU (a tick of /proc)."""
    before_own, before = own_cpu_seconds(), cpu_seconds([os.getpid()])
    burn(0.002)
    after = cpu_seconds([os.getpid()])
    assert before is not None and after is not None
    assert after - before >= 0.002 and own_cpu_seconds() - before_own >= after - before
    both = cpu_seconds([os.getpid(), os.getpid()])
    assert both is not None and both >= 2 * after


def test_another_process_is_read_until_it_is_gone() -> None:
    program = "import sys; sum(range(100000)); print(); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as other:
        assert other.stdout is not None
        other.stdout.readline()
        seconds = cpu_seconds([other.pid])
        assert seconds is not None and seconds > 0
    assert cpu_seconds([other.pid]) is None
    assert cpu_seconds([]) is None
