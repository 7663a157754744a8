"""A measured engine in a process of its own, stopped by signal while others are measured."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
from msgspec import Struct

from shared.errors import DiptychError, ResourceMissing

MAIN = Path(__file__).resolve().parent.parent / "peers" / "runners" / "main.py"
_CLOSE_TIMEOUT = 10.0
_MAX_LINE = 64 << 20


class EngineFailed(DiptychError):
    """A measured engine could not load or run what it was asked to; the log tells why."""


class Launch(Struct, frozen=True, kw_only=True):
    """How to start a measured engine.

    ``module``: its ``load`` is called with ``options``, see ``peers/runners/main.py``.
    ``environment``: added to this process's own.
    """

    name: str
    python: str
    module: str
    options: dict[str, Any]
    environment: dict[str, str] = {}


class Answer(Struct, frozen=True, kw_only=True):
    """``rss``: bytes of memory the process held afterwards."""

    value: Any = None
    rss: int = 0
    error: str | None = None


class Contestant:
    """Use as a context manager: entering starts the process and waits until it has loaded.

    Outside ``ask`` the process is stopped, so that its threads take nothing from others.

    Args:
        launch: what to start.
        log: receives what the engine prints.
        load_timeout: seconds that loading may take.
    """

    load_seconds: float
    loaded_rss: int
    rss: int

    def __init__(self, launch: Launch, log: Path, load_timeout: float) -> None:
        self.name = launch.name
        self._launch = launch
        self._log = log
        self._load_timeout = load_timeout
        self._buffer = bytearray()

    def __enter__(self) -> "Contestant":
        launch = self._launch
        self._log.parent.mkdir(parents=True, exist_ok=True)
        command = [launch.python, str(MAIN), launch.module, json.dumps(launch.options)]
        with self._log.open("wb") as log:
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env={**os.environ, **launch.environment},
                    start_new_session=True,
                )
            except OSError as error:
                raise ResourceMissing(f"cannot start {launch.python}: {error}") from error
        try:
            answer = self._answer(time.monotonic() + self._load_timeout)
        except BaseException:
            self.close()
            raise
        self.load_seconds, self.loaded_rss, self.rss = float(answer.value), answer.rss, answer.rss
        self._signal(signal.SIGSTOP)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def ask(self, do: str, timeout: float, **arguments: object) -> Any:  # noqa: ANN401
        """Let the process run one of its functions and return the value.

        Raises:
            EngineFailed: it reports an error, ends, or needs longer than ``timeout`` seconds.
        """
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps({"do": do, "with": arguments}).encode() + b"\n")
            self._process.stdin.flush()
            answer = self._answer(time.monotonic() + timeout)
        except OSError as error:
            raise self._failed(f"is gone ({error})") from error
        finally:
            self._signal(signal.SIGSTOP)
        self.rss = answer.rss
        return answer.value

    def close(self) -> None:
        """End the process; the second call does nothing."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        self._signal(signal.SIGCONT)
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(_CLOSE_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            process.wait(_CLOSE_TIMEOUT)
        process.stdout.close()

    def _answer(self, deadline: float) -> Answer:
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(fd, selectors.EVENT_READ)
            while (end := self._buffer.find(b"\n")) < 0:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise self._failed("does not answer in time")
                data = os.read(fd, 1 << 16)
                if not data or len(self._buffer) > _MAX_LINE:
                    raise self._failed("ended")
                self._buffer += data
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        try:
            answer = msgspec.json.decode(line, type=Answer)
        except msgspec.MsgspecError as error:
            raise self._failed(f"answers with {line[:80]!r}") from error
        if answer.error is not None:
            raise self._failed(answer.error)
        return answer

    def _failed(self, what: str) -> EngineFailed:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        last = f"; last words: {lines[-1][:300]}" if lines else ""
        return EngineFailed(f"{self.name}: {what}{last} (log: {self._log})")

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
