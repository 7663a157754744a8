"""The shell around every service: exit codes, signals, ready file, death with the parent."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from shared.ids import Incarnation
from shared.service import ReadyFile, ServiceArguments, parse_arguments

_PRELUDE = """
import asyncio, os, sys
from shared.errors import BadConfig
from shared.service import ServiceFailed, run_service
"""


def _python(body: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", _PRELUDE + body],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        ("BadConfig('no such key `x`')", 2, "error: no such key `x`"),
        ("ServiceFailed('engine broke')", 1, "error: engine broke"),
        ("KeyError('surprise')", 1, "surprise"),
    ],
)
def test_an_error_of_main_becomes_its_exit_code_and_sentence(
    error: str, code: int, line: str
) -> None:
    done = _python(f"async def main(stop): raise {error}\nsys.exit(run_service(main, 'x'))")
    assert done.returncode == code
    assert line in done.stderr
    assert ("Traceback" in done.stderr) == (error.startswith("KeyError"))


@pytest.mark.parametrize(("soft", "hard", "raised"), [(64, 512, 512), (64, None, 65536)])
def test_a_service_may_open_as_many_files_as_its_user(
    soft: int, hard: int | None, raised: int
) -> None:
    """Guards a gateway that refuses clients at the 1,024 files of a login shell."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1] if hard is None else hard
    body = f"""
import resource
async def main(stop):
    print(resource.getrlimit(resource.RLIMIT_NOFILE))
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {most}))
sys.exit(run_service(main, 'x'))
"""
    expected = raised if most == resource.RLIM_INFINITY else min(raised, most)
    assert _python(body).stdout == f"({expected}, {most})\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_main_to_stop_and_ends_with_code_0(number: int) -> None:
    body = f"""
async def main(stop):
    os.kill(os.getpid(), {int(number)})
    await asyncio.wait_for(stop.wait(), 10)
sys.exit(run_service(main, 'x'))
"""
    assert _python(body).returncode == 0


def test_a_second_signal_while_the_process_winds_up_changes_nothing() -> None:
    """Guards the exit code against Ctrl-C followed by the supervisor's SIGTERM."""
    body = """
async def main(stop): os.kill(os.getpid(), 15)
code = run_service(main, 'x')
os.kill(os.getpid(), 15)
os.kill(os.getpid(), 2)
sys.exit(code)
"""
    assert _python(body).returncode == 0


def test_the_service_is_told_when_its_parent_is_killed() -> None:
    """Guards orphans after ``kill -9`` of the parent."""
    child = (
        _PRELUDE
        + """
async def main(stop):
    print("up", os.getpid(), flush=True)
    await asyncio.wait_for(stop.wait(), 10)
    print("told", flush=True)
run_service(main, 'x', die_with_parent=0)
"""
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline().startswith("up")
        run.kill()
        assert run.stdout.readline() == "told\n"


def test_a_service_whose_parent_is_already_gone_does_not_start() -> None:
    body = """
async def main(stop): print('started')
sys.exit(run_service(main, 'x', die_with_parent=999999999))
"""
    done = _python(body)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_command_line_is_understood() -> None:
    assert parse_arguments("decode", ["--config", "a.yaml"]) == ServiceArguments(
        config=Path("a.yaml")
    )
    full = ["--config", "a.yaml", "--name", "decode-1", "--die-with-parent"]
    assert parse_arguments("decode", full) == ServiceArguments(
        config=Path("a.yaml"), name="decode-1", die_with_parent=0
    )


def test_the_ready_file_holds_the_facts_and_leaves_a_successors_file_alone(tmp_path: Path) -> None:
    ready = ReadyFile(tmp_path / "run", "gateway")
    ready.write(Incarnation(7), url="http://127.0.0.1:8000")
    path = tmp_path / "run" / "gateway.ready"
    assert msgspec.json.decode(path.read_bytes()) == {
        "pid": os.getpid(),
        "incarnation": 7,
        "url": "http://127.0.0.1:8000",
    }
    path.write_text('{"pid": 1}')
    ready.remove()
    assert path.exists()
    ready.write(Incarnation(7))
    ready.remove()
    ready.remove()
    assert not path.exists()
