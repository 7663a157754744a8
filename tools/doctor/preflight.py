"""The checks that must pass before ``diptych up`` starts anything."""

import os
import subprocess
import sys

from rich.console import Console

from shared.config import Deployment, WorkerSection
from shared.errors import ResourceMissing
from shared.kernels.build import KernelsUnavailable, build, is_built
from shared.known_models import KNOWN_MODELS
from shared.messages.fleet import Role
from shared.precision import slow_precision
from tools.doctor.deployment import check_endpoints, check_gateway, check_memory, check_port
from tools.doctor.machine import check_shared_memory
from tools.doctor.model import ModelFiles, inspect_model
from tools.fetch.fetch import fetch, is_fetched

_CONVERT_TIMEOUT = 1800.0


def require_machine(deployment: Deployment) -> None:
    """Raise ``DiptychError`` with one sentence unless ports and shared memory are there."""
    check_gateway(deployment)
    check_port(deployment.gateway.http)
    check_endpoints(deployment)
    check_shared_memory()


def prepare_model(deployment: Deployment, console: Console) -> None:
    """Fetch a known model that is not there, check it, its fit into memory, and convert it.

    Kernels are compiled as well: no worker should find itself doing that.

    Raises:
        DiptychError: no model, a damaged one, or too little memory.
    """
    warn_of_slow_weights(deployment, console)
    files = fetch_model(deployment, console)
    check_memory(deployment, files.parameters)
    build_kernels(console)
    convert_model(deployment, console)


def fetch_model(deployment: Deployment, console: Console) -> ModelFiles:
    """Fetch a known model that is not there, and check it.

    Raises:
        DiptychError: no model, or a damaged one.
    """
    known = KNOWN_MODELS.get(deployment.model.path)
    if known is not None and not is_fetched(known):
        fetch(known, console)
    return inspect_model(deployment.model.path)


def warn_of_slow_weights(deployment: Deployment, console: Console) -> None:
    """Print a line for every role whose precision this machine serves slowly."""
    roles: tuple[Role, ...] = ("prefill", "decode", "mixed")
    for role in roles:
        section: WorkerSection | None = getattr(deployment.workers, role)
        if section is None or not section.count:
            continue
        slow = slow_precision(section.precision, role, section.device)
        if slow is not None:
            console.print(f"[yellow]warning[/] {slow}", highlight=False)


def build_kernels(console: Console) -> None:
    """Compile the kernels if that was not done yet; say what it means where that fails."""
    try:
        if not is_built():
            with console.status("compiling kernels for this machine, once; a minute or so"):
                build()
    except KernelsUnavailable as error:
        console.print(f"[yellow]warning[/] no native kernels, so serving is slow: {error}")


def convert_model(deployment: Deployment, console: Console) -> None:
    """Convert the model for serving if that was not done yet. Raises ``ResourceMissing``."""
    with console.status(f"preparing {deployment.model.path}; the first time takes longer"):
        _convert(deployment.model.path)


def _convert(model: str) -> None:
    command = [sys.executable, "-P", "-m", "tools.doctor.convert", str(os.getpid()), model]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_CONVERT_TIMEOUT
        )
    except subprocess.TimeoutExpired as error:
        raise ResourceMissing(f"{model} could not be prepared in time") from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ResourceMissing(f"{model} cannot be served: {lines[-1].removeprefix('error: ')}")
