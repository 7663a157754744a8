"""Memory that chunks pass through stays with the process."""

import subprocess
import sys

import pytest

_COUNT = """
import resource
from shared.transport.bulk.staging import keep_staging_memory

keep_staging_memory()
chunks = [bytearray(512 << 10) for _ in range(32)]
del chunks
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    chunks = [bytearray(512 << 10) for _ in range(32)]
    del chunks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_chunks_do_not_fault_their_pages_in_again() -> None:
    """Guards half of the reader's time spent on pages: 10 windows of chunks are 40,960 of them."""
    done = subprocess.run(
        [sys.executable, "-c", _COUNT], capture_output=True, text=True, check=True, timeout=60
    )
    assert int(done.stdout) < 1000
