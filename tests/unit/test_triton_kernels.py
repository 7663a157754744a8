"""Our Triton kernels where there is no GPU: run by Triton's interpreter, compiled for several GPUs.

Both need triton, which comes with torch's CUDA builds, and a process each: the interpreter is
chosen when kernels are imported, and a compiler without a GPU needs a stand-in for the driver.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHARED_MEMORY = 99 << 10
"""Bytes one program may have on every GPU since Ampere."""

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="triton is not installed here"
    ),
    pytest.mark.timeout(300),
]


def run(cache: Path, *arguments: str, **variables: str) -> str:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), **variables}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return done.stdout


def test_interpreted_kernels_compute_attention(tmp_path: Path) -> None:
    """Every case of ``triton_interpreted.py``, by name in the output of a failure."""
    file = "tests/unit/triton_interpreted.py"
    out = run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", file, TRITON_INTERPRET="1")
    assert " passed" in out
    assert "skipped" not in out


def test_kernels_compile_for_a_gpu_and_fit_its_shared_memory(tmp_path: Path) -> None:
    """The interpreter runs what the compiler refuses: ranges that are no constants, types."""
    out = run(tmp_path, "-W", "error", "-m", "tests.unit.triton_compiled")
    built = [json.loads(line) for line in out.splitlines()]
    assert {b["capability"] for b in built} == {80, 89, 90}
    assert {b["kernel"] for b in built} == {
        "sum_partitions",
        "merge_partitions",
        "attend_chunk",
        "write_row",
        "write_scaled_row",
        "quantise_row",
    }
    # Compiled once per kind of layer, whatever the step: no request waits for a compiler.
    assert len(built) == 3 * (3 * 2 + 1) + 2
    assert max(b["shared"] for b in built) <= SHARED_MEMORY
