"""Every known error of the command line is one sentence and exit code 2."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.cli import main

Done = subprocess.CompletedProcess[str]
Command = Callable[..., Done]
GOOD = "name: x\ndeployment_type: split\nworkers: {prefill: {}, decode: {}}\n"


def process(*arguments: str, cwd: Path) -> Done:
    return subprocess.run(
        [sys.executable, "-m", "tools", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.fixture
def diptych(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """Run the command in this process and in ``tmp_path``: a process of its own takes seconds."""

    def run(*arguments: str) -> Done:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["diptych", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr()
        assert isinstance(end.value.code, int)
        return Done(arguments, end.value.code, said.out, said.err)

    return run


def sentence(done: Done) -> str:
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name: x\n", "deployment_type"),
        (GOOD + "gateway: {htp: 'x'}\n", "htp"),
        (GOOD.replace("prefill: {}", "prefill: {precision: fp8}"), "precision"),
        (GOOD.replace("prefill: {}, ", ""), "workers.prefill"),
        (GOOD + "router: {drain_timeout: soon}\n", "drain_timeout"),
        ("name: [\n", "x.yaml"),
    ],
)
def test_config_errors_name_file_and_key(
    diptych: Command, tmp_path: Path, text: str, words: str
) -> None:
    (tmp_path / "x.yaml").write_text(text)
    error = sentence(diptych("up", "x.yaml"))
    assert "x.yaml" in error and words in error


def test_no_config_file(tmp_path: Path) -> None:
    assert "nowhere.yaml" in sentence(process("up", "nowhere.yaml", cwd=tmp_path))


def test_no_model_and_nothing_started(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(
        f"{GOOD}model: {{path: /no/model}}\nruntime_dir: {tmp_path / 'r'}\n"
        "gateway: {http: '127.0.0.1:0'}\n"
    )
    assert "/no/model" in sentence(process("up", "x.yaml", cwd=tmp_path))
    assert list((tmp_path / "r").iterdir()) == []


@pytest.mark.parametrize(
    "command", [("status",), ("restart", "router"), ("chat",), ("bench", "serve")]
)
def test_commands_about_a_run_say_that_none_runs(
    diptych: Command, tmp_path: Path, command: tuple[str, ...]
) -> None:
    (tmp_path / "x.yaml").write_text(f"{GOOD}runtime_dir: {tmp_path / 'r'}\n")
    arguments = (*command, "--config", "x.yaml")
    if command[0] == "bench":
        arguments = (*command, "--url", "http://127.0.0.1:1")
    error = sentence(diptych(*arguments))
    assert "does not run" in error or "no server answers" in error


def test_wrong_concurrency(diptych: Command) -> None:
    assert "--concurrency" in sentence(diptych("bench", "serve", "--concurrency", "1,x"))


@pytest.mark.parametrize("command", ["engine", "quality"])
@pytest.mark.parametrize(
    ("option", "known"), [("--kv-dtype", "fp32, bf16, fp16, int8"), ("--precision", "int4")]
)
@pytest.mark.parametrize("given", ["", "int8,"])
def test_an_empty_name_is_refused_with_those_there_are(
    diptych: Command, command: str, option: str, known: str, given: str
) -> None:
    """Guards an empty variable in a script: everything was measured, or another KV than meant."""
    error = sentence(diptych("bench", command, option, given))
    assert option in error and known in error and repr(given) in error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("engine", "--precision", "bf16,fp8"), "`precision: fp8` is for GPUs: on a CPU use int8"),
        (("compare", "--kv-dtype", "fp8"), "`kv_dtype: fp8` is for GPUs: on a CPU use int8"),
        (("compare", "--device", "cuda", "--precision", "int8"), "on a GPU use fp8, bf16"),
        (("compare", "--serving", "--device", "cuda"), "--device cuda is for engines"),
        (("compare", "--serving", "--kv-dtype", "int8"), "--kv-dtype int8 is for engines"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(
    diptych: Command, arguments: tuple[str, ...], said: str
) -> None:
    """Guards minutes of measuring the others before a row of dashes, and options without effect."""
    assert said in sentence(diptych("bench", *arguments))


@pytest.mark.parametrize(
    "arguments",
    [
        ("chat", "--temperature", "-1"),
        ("chat", "--max-tokens", "0"),
        ("bench", "serve", "--input", "0"),
        ("bench", "serve", "--output", "0"),
        ("bench", "serve", "--requests", "0"),
    ],
)
def test_a_number_that_no_request_may_have_is_refused_with_the_range(
    diptych: Command, arguments: tuple[str, ...]
) -> None:
    """Guards a load of other numbers than asked for, and a chat whose every line fails."""
    done = diptych(*arguments)
    assert done.returncode == 2
    said = " ".join(done.stderr.replace("\u2502", " ").split())
    assert arguments[-2] in said and "should be greater than or equal to" in said


def test_keys_are_written_once_and_never_over(tmp_path: Path) -> None:
    assert process("keys", "k", cwd=tmp_path).returncode == 0
    assert (tmp_path / "k" / "server.secret").stat().st_mode & 0o777 == 0o600
    assert "never overwritten" in sentence(process("keys", "k", cwd=tmp_path))


@pytest.mark.parametrize(
    "command", ["up", "status", "restart", "chat", "doctor", "fetch", "keys", "bench serve"]
)
def test_help_teaches_with_an_example(diptych: Command, command: str) -> None:
    done = diptych(*command.split(), "--help")
    assert done.returncode == 0
    assert f"diptych {command}" in done.stdout.replace("│", " ")
    assert "Example" in done.stdout
