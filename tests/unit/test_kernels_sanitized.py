"""The kernels under the address and undefined-behaviour sanitizers, without torch."""

import subprocess
from pathlib import Path

import pytest

from shared.cpuinfo import cpu_flags
from shared.kernels.build import (
    CompileJob,
    KernelsUnavailable,
    compile_all,
    find_compiler,
    link,
    tier_jobs,
)
from tests.unit.cpu_tiers import runnable

_SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
_FLAGS = ("-std=c++20", "-O0", "-g1", "-fopenmp", "-Wno-psabi", *_SANITIZE)


@pytest.mark.timeout(300)
def test_no_kernel_reads_or_writes_beyond_its_buffers(tmp_path: Path) -> None:
    """Tiles, tails and paddings of every tier on buffers that end where the data ends.

    Not optimised: it compiles in half the time, and no access is optimised away.
    """
    try:
        compiler = find_compiler()
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    jobs = [*tier_jobs(), CompileJob("selftest", "selftest.cpp", ())]
    binary = tmp_path / "selftest"
    link(compiler, compile_all(compiler, jobs, tmp_path, _FLAGS), binary, _SANITIZE)
    done = subprocess.run([binary], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    ran = [line.partition(": ")[0] for line in done.stdout.splitlines() if line.endswith(": ok")]
    assert ran == runnable(cpu_flags()), done.stdout
