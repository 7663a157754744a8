"""Compile ``kernels/*.cpp`` once with the system's compiler and keep the library in the cache.

The folder is named after everything that goes into it (sources, flags, compiler, torch), so a
change of any of these builds anew, and processes of one machine share one build.

``python -m shared.kernels.build`` compiles into ``kernels/built`` instead, for an image that
holds no compiler; such a library serves as long as sources, flags and torch are the same.
"""

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from msgspec import Struct

from shared.file_lock import LockTimeout, file_lock
from shared.known_models import cache_dir

SOURCE_DIR: Final = Path(__file__).resolve().parents[2] / "kernels"
SHIPPED_DIR: Final = SOURCE_DIR / "built"

_COMPILERS: Final = ("g++", "c++", "clang++")
_COMPILE_TIMEOUT: Final = 600.0
_LOCK_TIMEOUT: Final = 900.0
_LIBRARY: Final = "diptych_kernels.so"
_FLAGS: Final = ("-std=c++20", "-O2", "-fPIC", "-fopenmp", "-fno-strict-aliasing", "-Wno-psabi")
_AVX512: Final = (
    *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni"),
    *("-mfma", "-mf16c"),
)
TIERS: Final[dict[str, tuple[str, ...]]] = {
    "generic": (),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": _AVX512,
    "avx512bf16": (*_AVX512, "-mavx512bf16"),
    "amx": (*_AVX512, "-mavx512bf16", "-DDIPTYCH_AMX"),
}
"""Compiler flags of each tier; ``kernels/dispatch.cpp`` chooses among them at run time."""
_PLAIN_SOURCES: Final = ("team.cpp", "dispatch.cpp", "plan.cpp", "weights.cpp", "int4_fit.cpp")
_TORCH_SOURCES: Final = ("ops.cpp", "stack.cpp", "weight_memory.cpp")


class KernelsUnavailable(Exception):
    """No native kernels here; the message says why in one sentence."""


class CompileJob(Struct, frozen=True):
    """One translation unit: ``source`` compiled with ``flags`` into ``name``.o."""

    name: str
    source: str
    flags: tuple[str, ...]


def tiers_here() -> tuple[str, ...]:
    """Return the tiers that make sense on this kind of machine."""
    return tuple(TIERS) if platform.machine() in ("x86_64", "AMD64") else ("generic",)


def tier_jobs() -> list[CompileJob]:
    """Return the jobs that need no torch: kernels of every tier and what connects them."""
    tiers = tiers_here()
    common = ("-DDIPTYCH_X86",) if len(tiers) > 1 else ()
    jobs = [
        CompileJob(f"tier_{tier}", "tier.cpp", (f"-DDIPTYCH_TIER={tier}", *TIERS[tier]))
        for tier in tiers
    ]
    return jobs + [CompileJob(Path(s).stem, s, common) for s in _PLAIN_SOURCES]


def build() -> Path:
    """Return the library, compiled now unless it was shipped or the cache holds it.

    Raises:
        KernelsUnavailable: no compiler, no sources, a failed compilation, or a cache that
            cannot be written.
    """
    library = _library()
    if library.is_file():
        return library
    target = library.parent
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(target.with_name(f"{target.name}.lock"), _LOCK_TIMEOUT):
            if not library.is_file():
                _build_into(target, find_compiler())
    except LockTimeout as error:
        raise KernelsUnavailable(
            f"another process has been compiling kernels for {_LOCK_TIMEOUT:.0f} s"
        ) from error
    except OSError as error:
        raise KernelsUnavailable(f"cannot build kernels in {target.parent}: {error}") from error
    return library


def is_built() -> bool:
    """Say whether ``build`` has nothing left to do. Raises ``KernelsUnavailable`` as it does."""
    return _library().is_file()


def _library() -> Path:
    """Return where the library is: shipped, or else in the cache, built or not."""
    if not SOURCE_DIR.is_dir():
        raise KernelsUnavailable(f"the kernel sources are not installed ({SOURCE_DIR})")
    shipped = SHIPPED_DIR / _fingerprint() / _LIBRARY
    if shipped.is_file():
        return shipped
    return cache_dir() / "kernels" / _fingerprint(find_compiler()) / _LIBRARY


def ship() -> Path:
    """Compile into ``kernels/built`` and return the library. Raises ``KernelsUnavailable``."""
    target = SHIPPED_DIR / _fingerprint()
    SHIPPED_DIR.mkdir(exist_ok=True)
    if not (target / _LIBRARY).is_file():
        _build_into(target, find_compiler())
    return target / _LIBRARY


def find_compiler() -> str:
    """Return the path of a C++ compiler. Raises ``KernelsUnavailable`` where there is none."""
    for name in _COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return path
    raise KernelsUnavailable(f"no C++ compiler found ({', '.join(_COMPILERS)})")


def compile_all(
    compiler: str, jobs: Sequence[CompileJob], folder: Path, flags: tuple[str, ...] = _FLAGS
) -> list[Path]:
    """Compile ``jobs`` side by side into ``folder``; return the object files.

    Raises:
        KernelsUnavailable: the compiler rejects a source or does not end.
    """

    def one(job: CompileJob) -> Path:
        out = folder / f"{job.name}.o"
        source = str(SOURCE_DIR / job.source)
        _run([compiler, *flags, *job.flags, "-c", source, "-o", str(out)])
        return out

    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(one, jobs))


def link(compiler: str, objects: Sequence[Path], out: Path, flags: Sequence[str]) -> None:
    """Link ``objects``. Raises ``KernelsUnavailable`` where that fails."""
    _run([compiler, "-fopenmp", *(str(o) for o in objects), "-o", str(out), *flags])


def _build_into(target: Path, compiler: str) -> None:
    started = time.monotonic()
    _say("compiling kernels (once per version; takes a minute at most)")
    partial = target.with_name(f"{target.name}.partial")
    for leftover in (partial, target):
        if leftover.exists():
            shutil.rmtree(leftover)
    partial.mkdir()
    try:
        root = _torch_root()
        includes = tuple(
            part
            for folder in (root / "include", root / "include/torch/csrc/api/include")
            for part in ("-isystem", str(folder))
        )
        # The largest first, so that no core waits at the end.
        jobs = [CompileJob(Path(s).stem, s, includes) for s in _TORCH_SOURCES] + tier_jobs()
        objects = compile_all(compiler, jobs, partial)
        library = ("-shared", f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10")
        link(compiler, objects, partial / _LIBRARY, library)
        for file in objects:
            file.unlink()
        partial.rename(target)
    finally:
        if partial.exists():
            shutil.rmtree(partial)
    _say(f"compiled kernels in {time.monotonic() - started:.0f} s")


def _fingerprint(compiler: str | None = None) -> str:
    """Return the name of what the sources become, by ``compiler`` or by any."""
    digest = hashlib.sha256()
    described: tuple[object, ...] = (_torch_version(), platform.machine(), _FLAGS, TIERS)
    if compiler is not None:
        described += (compiler, _run([compiler, "--version"]).splitlines()[0])
    digest.update(repr(described).encode())
    for path in sorted(SOURCE_DIR.iterdir()):
        if path.suffix in (".cpp", ".h"):
            digest.update(f"{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:32]


def _torch_root() -> Path:
    """Return the folder of torch without importing it, which takes a second."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise KernelsUnavailable("torch is not installed")
    return Path(spec.origin).parent


def _torch_version() -> str:
    spec = importlib.util.spec_from_file_location("torch_version", _torch_root() / "version.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.__version__)


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise KernelsUnavailable(f"{command[0]} did not end in {_COMPILE_TIMEOUT:.0f} s") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line.lower()]
        reason = lines[0] if lines else f"exit code {done.returncode}"
        raise KernelsUnavailable(f"{Path(command[0]).name} failed: {reason}")
    return done.stdout


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    print(ship())
