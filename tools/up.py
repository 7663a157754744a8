"""``diptych up``: check the machine, start a deployment, show it, stop it, leave nothing."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from rich.console import Console

from shared.config import Deployment, load_deployment
from shared.errors import DiptychError, ResourceMissing
from tools.doctor.preflight import prepare_model, require_machine
from tools.greeting import greet
from tools.parent import follow_parent
from tools.supervise.locks import UpLock
from tools.supervise.logs import refusal, shorten, tail
from tools.supervise.observe import BecameReady, Ended, Event, Failed, Watch
from tools.supervise.plan import Process, processes, run_paths
from tools.supervise.run import Run, claim

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_REFUSED = 2

_TICK_STARTING = 0.1
_TICK_RUNNING = 0.5
_LOG_CHECK = 60.0
_TAIL_LINES = 20


class ServiceFailed(DiptychError):
    """A service refused to start or keeps crashing."""

    code = "resource_missing"

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class StopRequest:
    """Ctrl-C and SIGTERM. ``again`` is set by a second Ctrl-C."""

    def __init__(self) -> None:
        self._wake = threading.Event()
        self.requested = False
        self.again = False

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Take note of a signal."""
        if self.requested and number == signal.SIGINT:
            self.again = True
        self.requested = True
        self._wake.set()

    def wait(self, seconds: float) -> None:
        """Sleep, but not beyond a signal."""
        self._wake.wait(seconds)
        self._wake.clear()


def up(config: Path, console: Console, *, ready_timeout: float, die_with_parent: bool) -> int:
    """Run a deployment until Ctrl-C or SIGTERM; return the exit code.

    Raises:
        DiptychError: the config or the machine is not fit; nothing was started.
    """
    config = config.absolute()
    deployment = load_deployment(config)
    with _signals(_leave):
        if die_with_parent and not follow_parent(os.getppid()):
            return EXIT_FAILED
        lock = claim(deployment, config)
        try:
            require_machine(deployment)
            prepare_model(deployment, console)
        except BaseException:
            lock.release()
            raise
        stop = StopRequest()
        with _signals(stop.on_signal):
            return _Session(deployment, config, console, stop).run(lock, ready_timeout)


class _Session:
    def __init__(
        self, deployment: Deployment, config: Path, console: Console, stop: StopRequest
    ) -> None:
        self._deployment = deployment
        self._config = config
        self._console = console
        self._stop = stop
        self._processes = {p.name: p for p in processes(deployment)}
        self._unanswered = False
        paths = run_paths(deployment)
        self._log_starts = {
            name: path.stat().st_size if (path := paths.log(name)).exists() else 0
            for name in self._processes
        }

    def run(self, lock: UpLock, ready_timeout: float) -> int:
        begun = time.monotonic()
        self._console.print(_headline(self._deployment))
        run = Run.start(self._deployment, self._config, lock)
        watch = Watch(run.names, begun)
        code = EXIT_OK
        try:
            self._until_ready(run, watch, begun + ready_timeout)
            if not self._stop.requested:
                self._introduce(run, begun)
                self._until_stopped(run, watch)
        except ServiceFailed as error:
            self._console.print(f"[red]error:[/red] {error.message}", soft_wrap=True)
            code = error.exit_code
        except ResourceMissing as error:
            self._console.print(f"[red]error:[/red] {error.message}", soft_wrap=True)
            code = EXIT_FAILED
        finally:
            self._shut_down(run)
        return code

    def _until_ready(self, run: Run, watch: Watch, deadline: float) -> None:
        while not (watch.all_ready or self._stop.requested):
            self._tick(run, watch)
            if time.monotonic() >= deadline:
                waiting = ", ".join(sorted(set(run.names) - set(run.ready())))
                raise ServiceFailed(f"not ready in time: {waiting}; logs: {run.paths.logs}", 1)
            self._stop.wait(_TICK_STARTING)

    def _introduce(self, run: Run, begun: float) -> None:
        url = run.ready()["gateway"].url
        if url is None:
            raise ResourceMissing("the gateway's ready file names no url")
        command = greet(url, self._deployment, self._deployment.router.hung_after)
        seconds = time.monotonic() - begun
        self._console.print(f"\n[bold]{url}[/bold]  ready after {seconds:.1f} s", highlight=False)
        self._console.print(f"\n{command}\n", soft_wrap=True, highlight=False, markup=False)
        self._console.print(f"logs: {run.paths.logs}   stop: Ctrl-C", soft_wrap=True)

    def _until_stopped(self, run: Run, watch: Watch) -> None:
        checked = time.monotonic()
        while not self._stop.requested:
            self._stop.wait(_TICK_RUNNING)
            if not self._stop.requested:
                self._look(run, watch)
            if time.monotonic() - checked > _LOG_CHECK:
                shorten(run.paths.logs)
                checked = time.monotonic()

    def _look(self, run: Run, watch: Watch) -> None:
        """Tell what happened; services run on under a supervisor that lives but is not heard."""
        try:
            self._tick(run, watch)
        except ResourceMissing as error:
            if run.alive and not self._unanswered:
                text = f"[yellow]warning:[/yellow] {error.message}; the services run on"
                self._console.print(text, soft_wrap=True)
            self._unanswered = True
        else:
            self._unanswered = False

    def _tick(self, run: Run, watch: Watch) -> None:
        if not run.alive:
            raise ServiceFailed("the supervisor ended; the services stop with it", EXIT_FAILED)
        for event in watch.update(run.control.states(), run.ready(), time.monotonic()):
            self._show(run, event)

    def _show(self, run: Run, event: Event) -> None:
        match event:
            case BecameReady(name=name, pid=pid, seconds=seconds, again=again):
                word = "ready again" if again else "ready"
                process = self._processes[name]
                self._console.print(_ready_line(process, pid, seconds, word), highlight=False)
            case Ended(name=name, pid=pid):
                self._console.print(f"  {name} (pid {pid}) ended; it is started again")
            case Failed(name=name, reason=reason):
                log, start = run.paths.log(name), self._log_starts[name]
                sentence = refusal(log, start=start)
                if reason == "refused" and sentence is not None:
                    raise ServiceFailed(f"{name}: {sentence}", EXIT_REFUSED)
                lines = "\n".join(tail(log, _TAIL_LINES, start=start))
                raise ServiceFailed(
                    f"{name} does not stay up; the end of {log}:\n{lines}", EXIT_FAILED
                )

    def _shut_down(self, run: Run) -> None:
        begun = time.monotonic()
        hard = self._stop.again
        if run.alive and not hard:
            self._console.print("stopping; a second Ctrl-C ends everything at once")
        run.terminate()
        deadline = begun + run.stop_limit()
        while not run.stopped():
            if hard or self._stop.again or time.monotonic() >= deadline:
                run.kill()
                break
            self._stop.wait(_TICK_STARTING)
        run.close()
        self._console.print(f"stopped after {time.monotonic() - begun:.1f} s")


@contextlib.contextmanager
def _signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _leave(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _headline(deployment: Deployment) -> str:
    counts = ", ".join(
        f"{count} {role}"
        for role in ("prefill", "decode", "mixed")
        if (count := sum(p.role == role for p in processes(deployment)))
    )
    return (
        f"[bold]diptych[/bold] {deployment.name}: {deployment.model.path}, "
        f"{deployment.deployment_type} ({counts})"
    )


def _ready_line(process: Process, pid: int, seconds: float, word: str) -> str:
    return f"  {process.name:<12} {process.role:<8} {word:<12} pid {pid:<8} {seconds:5.1f} s"
