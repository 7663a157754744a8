"""Building and loading: no compiler, a broken source, two processes at once, one warning."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from shared.kernels import build as builder
from shared.kernels import load
from shared.kernels.build import CompileJob, KernelsUnavailable, compile_all, find_compiler


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(builder, "cache_dir", lambda: tmp_path)
    return tmp_path / "kernels"


def test_no_compiler_means_torch_and_one_warning(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine without a compiler must serve, and say once why it is slower."""
    monkeypatch.setattr("shutil.which", lambda name: None)
    load.native.cache_clear()
    try:
        assert not load.native()
        assert not load.native()
        assert load.tier() == "torch"
    finally:
        load.native.cache_clear()
    warning = capsys.readouterr().err
    assert warning.count("warning:") == 1
    assert "no C++ compiler found" in warning


def test_missing_sources_are_named(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(builder, "SOURCE_DIR", tmp_path / "nowhere")
    with pytest.raises(KernelsUnavailable, match="not installed"):
        builder.build()


def test_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file where the folder should be; the process must not end with a traceback."""
    (tmp_path / "kernels").write_text("")
    monkeypatch.setattr(builder, "cache_dir", lambda: tmp_path)
    with pytest.raises(KernelsUnavailable, match="cannot build kernels"):
        builder.build()


def test_failed_compilation_leaves_nothing_to_load(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Half a build must never be taken for a whole one."""
    sources = tmp_path / "sources"
    sources.mkdir()
    for name in ("ops.cpp", "stack.cpp", "weight_memory.cpp", "tier.cpp"):
        (sources / name).write_text("int broken = ;")
    monkeypatch.setattr(builder, "SOURCE_DIR", sources)
    with pytest.raises(KernelsUnavailable, match=r"failed: .*error"):
        builder.build()
    assert [p.suffix for p in empty_cache.iterdir()] == [".lock"]


def test_a_change_of_the_sources_builds_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = find_compiler()
    before = builder._fingerprint(compiler)
    (tmp_path / "tier.cpp").write_text("int changed;")
    monkeypatch.setattr(builder, "SOURCE_DIR", tmp_path)
    assert builder._fingerprint(compiler) != before


def test_compiler_that_does_not_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slow = tmp_path / "g++"
    slow.write_text("#!/bin/sh\nexec sleep 30\n")
    slow.chmod(0o755)
    monkeypatch.setattr(builder, "_COMPILE_TIMEOUT", 0.3)
    with pytest.raises(KernelsUnavailable, match="did not end"):
        compile_all(str(slow), [CompileJob("a", "tier.cpp", ())], tmp_path)


def test_two_processes_build_once(tmp_path: Path) -> None:
    """Prefill and decode start together: one compiles, the other waits and takes the result."""
    program = (
        "import sys, time, pathlib\n"
        "from shared.kernels import build\n"
        f"build.cache_dir = lambda: pathlib.Path({str(tmp_path)!r})\n"
        "def slow(target, compiler):\n"
        "    print('built', flush=True); time.sleep(0.5)\n"
        "    target.mkdir(); (target / build._LIBRARY).write_bytes(b'')\n"
        "build._build_into = slow\n"
        "build.build()\n"
    )
    command = [sys.executable, "-c", program]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [p.communicate(timeout=60)[0] for p in processes]
    assert [p.returncode for p in processes] == [0, 0]
    assert "".join(outputs).count("built") == 1


def test_the_image_compiles_kernels_with_the_files_it_has_by_then(tmp_path: Path) -> None:
    """Guards an image that cannot be built: the Dockerfile copies those few sources by name."""
    repo = Path(__file__).resolve().parents[2]
    before = (repo / "Dockerfile").read_text().partition("RUN python -m shared.kernels.build")[0]
    for line in before.splitlines():
        if line.startswith("COPY shared/"):
            *files, folder = line.split()[1:]
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
            for file in files:
                shutil.copy(repo / file, tmp_path / folder)
    # Without site, whose hook for editable packages would find what is missing here.
    program = (
        f"import sys; sys.path.append({sysconfig.get_path('purelib')!r})\n"
        "import shared.kernels.build as it; print(it.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "shared/kernels/build.py")
