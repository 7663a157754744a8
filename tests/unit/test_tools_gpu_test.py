"""``make gpu-test`` says that it tested nothing, and fails where a test fails."""

import subprocess
from typing import Any

import pytest
import torch

from tools import gpu_test


def outcome(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, device: bool, code: int | None
) -> int:
    """Run it with this build of torch and device; ``code`` None: pytest must not start."""

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        assert code is not None, "tests were started"
        assert command[-3:] == ["-m", "gpu", "-rs"]
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device)
    monkeypatch.setattr(gpu_test.subprocess, "run", run)
    return gpu_test.main()


@pytest.mark.parametrize(
    ("cuda", "device", "code", "said"),
    [
        (None, False, None, "is a build for CPUs"),
        ("13.0", False, None, "no CUDA device on this machine"),
        ("13.0", True, 5, "no test that needs a CUDA device"),
    ],
)
def test_nothing_tested_is_said_and_no_failure(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    cuda: str | None,
    device: bool,
    code: int | None,
    said: str,
) -> None:
    """Guards: a green line that somebody takes for a passed test."""
    assert outcome(monkeypatch, cuda, device, code) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("SKIPPED gpu-test: ") and said in printed


@pytest.mark.parametrize("code", [0, 1, 2])
def test_what_pytest_says_is_what_make_gets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int
) -> None:
    assert outcome(monkeypatch, "13.0", True, code) == code
    assert capsys.readouterr().out == ""
