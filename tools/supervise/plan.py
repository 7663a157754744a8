"""Which processes a deployment consists of, and the supervisor configuration that runs them."""

import shlex
import sys
from pathlib import Path

from msgspec import Struct

from shared.config import Deployment
from shared.runtime import runtime_dir, worker_ids

STOP_MARGIN = 10.0
"""Seconds a process gets beyond the drain timeout before it is killed."""

_MODULES = {"prefill": "prefill", "decode": "decode", "mixed": "decode"}
_ENVIRONMENT = 'GOMP_SPINCOUNT="1000"'
"""OpenMP's threads wait some 10 us for the next step, then sleep. The 1 to 3 ms that they take else
belong to the worker that a core was borrowed from. libgomp has no other way to say so."""


class Process(Struct, frozen=True, kw_only=True):
    """One supervised process; ``role`` is what the user calls it, ``module`` what runs it."""

    name: str
    role: str
    module: str


class RunPaths(Struct, frozen=True, kw_only=True):
    """The files of one run, all in the deployment's run directory."""

    root: Path

    @property
    def logs(self) -> Path:
        """Folder of one log per process; the only thing a finished run leaves."""
        return self.root / "logs"

    @property
    def conf(self) -> Path:
        """Generated supervisor configuration."""
        return self.root / "supervisor.conf"

    @property
    def socket(self) -> Path:
        """Control socket of the supervisor."""
        return self.root / "supervisor.sock"

    @property
    def up_lock(self) -> Path:
        """Held by ``diptych up`` and its supervisor."""
        return self.root / "up.lock"

    @property
    def services_lock(self) -> Path:
        """Shared by every supervised process for as long as it lives."""
        return self.root / "services.lock"

    def log(self, name: str) -> Path:
        """Log file of a process."""
        return self.logs / f"{name}.log"

    def ready(self, name: str) -> Path:
        """File that exists while a process is ready."""
        return self.root / f"{name}.ready"


def run_paths(deployment: Deployment) -> RunPaths:
    """Return the files of this deployment's run."""
    return RunPaths(root=runtime_dir(deployment))


def processes(deployment: Deployment) -> list[Process]:
    """Return every process of the deployment, in the order in which they are started."""
    workers = [
        Process(name=name, role=role, module=f"services.{_MODULES[role]}")
        for name, role in worker_ids(deployment)
    ]
    return [
        *workers,
        Process(name="router", role="router", module="services.router"),
        Process(name="gateway", role="gateway", module="services.gateway"),
    ]


def render_conf(
    deployment: Deployment, config: Path, paths: RunPaths, *, parent: int, directory: Path
) -> str:
    """Return the supervisor configuration.

    ``parent`` is the pid of the supervisor that will read it. Groups stop in descending
    priority, each only after the one before is down: gateway, router, workers. ``startsecs``
    is 0 because the supervisor forgets the exit code of a process that ends sooner.
    """
    stop_wait = int(deployment.router.drain_timeout + STOP_MARGIN)
    everything = processes(deployment)
    workers = [p for p in everything if p.role in _MODULES]
    sections = [
        _section(
            "supervisord",
            nodaemon="true",
            silent="true",
            logfile=paths.log("supervisor"),
            logfile_maxbytes="1MB",
            logfile_backups="1",
            pidfile=paths.root / "supervisor.pid",
            minfds="64",
            umask="077",
        ),
        _section("unix_http_server", file=paths.socket, chmod="0600"),
        _section(
            "rpcinterface:supervisor",
            **{
                "supervisor.rpcinterface_factory": (
                    "supervisor.rpcinterface:make_main_rpcinterface"
                )
            },
        ),
    ]
    for process in everything:
        sections.append(
            _section(
                f"program:{process.name}",
                command=_command(process, config, paths, parent),
                directory=directory,
                environment=_ENVIRONMENT,
                priority=_priority(process),
                autorestart="unexpected",
                exitcodes="2",
                startsecs="0",
                stopsignal="TERM",
                stopwaitsecs=str(stop_wait),
                stdout_logfile="NONE",
                stderr_logfile="NONE",
            )
        )
    sections.append(
        _section("group:workers", programs=",".join(p.name for p in workers), priority="10")
    )
    return "\n".join(sections)


def _priority(process: Process) -> str:
    return {"router": "20", "gateway": "30"}.get(process.role, "10")


def _command(process: Process, config: Path, paths: RunPaths, parent: int) -> str:
    words = [sys.executable, "-E", "-S", str(Path(__file__).with_name("launch.py"))]
    words += [str(parent), str(paths.services_lock), str(paths.log(process.name))]
    words += [sys.executable, "-P", "-m", process.module]
    words += ["--config", str(config), "--name", process.name]
    words += ["--die-with-parent", str(parent)]
    return shlex.join(words)


def _section(section: str, **values: object) -> str:
    lines = [f"{key} = {str(value).replace('%', '%%')}" for key, value in values.items()]
    return "\n".join([f"[{section}]", *lines, ""])
