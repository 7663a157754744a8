"""``make gpu-test``: run the tests that need a CUDA device, or say that there is none."""

import subprocess
import sys

import torch

_NO_TESTS = 5
"""Exit code of pytest when it collected nothing."""


def main() -> int:
    """Return pytest's exit code; 0 with a visible line where nothing can be tested."""
    if torch.version.cuda is None:
        print(f"SKIPPED gpu-test: torch {torch.__version__} is a build for CPUs")
        return 0
    if not torch.cuda.is_available():
        print("SKIPPED gpu-test: no CUDA device on this machine")
        return 0
    done = subprocess.run([sys.executable, "-m", "pytest", "-m", "gpu", "-rs"], check=False)
    if done.returncode == _NO_TESTS:
        print("SKIPPED gpu-test: this version has no test that needs a CUDA device")
        return 0
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
