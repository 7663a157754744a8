"""Check the machine: Python, packages, processor, shared memory, compiler."""

import importlib.metadata
import mmap
import os
import shutil
import subprocess
import sys

from packaging.requirements import Requirement

from shared.cpuinfo import cpu_flags, cpuinfo
from shared.errors import ResourceMissing
from shared.kernels.build import KernelsUnavailable, is_built
from tools.doctor.finding import Finding, attempt, fail, ok, warn

_PROBE = b"diptych"
_PROBE_TIMEOUT = 10.0
_DISTRIBUTION = "diptych-server"


def check_machine() -> list[Finding]:
    """Run every check that needs no deployment."""
    return [
        _python(),
        _packages(),
        _processor(),
        attempt("shared memory", check_shared_memory),
        _compiler(),
        _kernels(),
    ]


def check_shared_memory() -> str:
    """Share a page with another process the way workers share KV.

    Raises:
        ResourceMissing: no memfd, or one process may not open another's descriptors.
    """
    try:
        fd = os.memfd_create("diptych-doctor", os.MFD_CLOEXEC)
    except OSError as error:
        raise ResourceMissing(f"memfd_create does not work here: {error.strerror}") from error
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        os.pwrite(fd, _PROBE, 0)
        reader = (
            f"import sys; sys.stdout.buffer.write(open('/proc/{os.getpid()}/fd/{fd}','rb').read(7))"
        )
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", reader],
            capture_output=True,
            check=False,
            timeout=_PROBE_TIMEOUT,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ResourceMissing(f"shared memory does not work here: {error}") from error
    finally:
        os.close(fd)
    if done.stdout != _PROBE:
        raise ResourceMissing(
            "a process may not open another's /proc/PID/fd here; run all services in one "
            "container, as one user, with /proc mounted"
        )
    return "memfd through /proc/PID/fd works"


def _python() -> Finding:
    return ok("python", f"{sys.version.split()[0]} in {sys.prefix}")


def _packages() -> Finding:
    try:
        wanted = importlib.metadata.requires(_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return fail("packages", "diptych-server is not installed here; run: make up")
    problems, count = [], 0
    for requirement in map(Requirement, wanted):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        count += 1
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            problems.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            problems.append(f"{requirement.name} is {version}, wanted {requirement.specifier}")
    if problems:
        return fail("packages", f"{'; '.join(problems)}; run: make up")
    return ok("packages", f"{count} packages fit")


def _processor() -> Finding:
    flags = cpu_flags()
    cores = len(os.sched_getaffinity(0))
    text = f"{cores} cores, {cpuinfo('model name') or 'unknown processor'}"
    if not flags:
        return ok("processor", text)
    fast = [name for name in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if name in flags]
    text = f"{text}, {', '.join(fast) or 'no vector extensions'}"
    if not {"amx_bf16", "avx512_bf16"} & flags:
        return warn("processor", f"{text}; without bf16 units `precision: fp32` may be faster")
    if cores < 2:
        return warn("processor", f"{text}; prefill and decode will share one core")
    return ok("processor", text)


def _compiler() -> Finding:
    found = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if found is None:
        return warn("compiler", "no C++ compiler; on Debian and Ubuntu: apt install g++")
    return ok("compiler", found)


def _kernels() -> Finding:
    try:
        built = is_built()
    except KernelsUnavailable as error:
        return warn("kernels", f"{error}; slower ones in plain torch run instead")
    return ok("kernels", "compiled" if built else "will be compiled at the first start, once")
