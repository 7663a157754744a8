"""A compose project of its own on whatever container engine this machine has."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
FILES = ("compose.yaml", "tests/compose/override.yaml")
_COMMANDS = (
    ("docker", "compose"),
    ("docker-compose",),
    ("podman", "compose"),
    ("compose",),
)
_ENGINES = ("docker", "podman")


def find_compose() -> tuple[str, ...] | None:
    """Return the first compose command here that reaches a running engine."""
    for command in _COMMANDS:
        if shutil.which(command[0]) is None:
            continue
        done = subprocess.run(
            [*command, "ls", "--format", "json"], capture_output=True, check=False, timeout=120
        )
        if done.returncode == 0:
            return command
    return None


class Project:
    """``docker compose`` with the shipped file, this test's override and a project name."""

    def __init__(self, command: tuple[str, ...], port: int) -> None:
        self.name = f"diptych-test-{os.getpid()}"
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._command = command
        self._environment = os.environ | {"DIPTYCH_PORT": str(port)}

    def run(self, *arguments: str, timeout: float = 600.0, check: bool = True) -> str:
        """Run one compose command and return its stdout; its words are in the failure."""
        files = [part for file in FILES for part in ("-f", file)]
        done = subprocess.run(
            [*self._command, "-p", self.name, *files, *arguments],
            cwd=REPO,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )
        if check and done.returncode != 0:
            raise AssertionError(f"{arguments} ended with {done.returncode}: {done.stderr[-3000:]}")
        return done.stdout

    @contextmanager
    def watching(self, tree: Path, *services: str) -> Iterator[None]:
        """Run ``compose watch`` on another copy of the project meanwhile, once it looks."""
        files = [part for file in FILES for part in ("-f", file)]
        watch = subprocess.Popen(
            [*self._command, "-p", self.name, *files, "watch", "--no-up", *services],
            cwd=tree,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            said = ""
            assert watch.stdout is not None
            for line in watch.stdout:  # the test's own deadline ends this
                said += line
                if "watch" in line.lower():
                    break
            else:
                raise AssertionError(f"watch ended with {watch.wait()}: {said}")
            yield
        finally:
            watch.terminate()
            watch.wait(30)
            if watch.stdout is not None:
                watch.stdout.close()

    def inside(self, service: str, *command: str, index: int = 1) -> str:
        """Run a command inside a container and return its stdout."""
        return self.run("exec", "-T", "--index", str(index), service, *command)

    def states(self) -> dict[str, str]:
        """Return container name -> state and health, such as ``running healthy``."""
        text = self.run("ps", "-a", "--format", "json").strip()
        rows = json.loads(text) if text.startswith("[") else map(json.loads, text.splitlines())
        return {row["Name"]: f"{row['State']} {row['Health']}".strip() for row in rows}

    def left(self) -> list[str]:
        """Return what engines still hold of this project: containers, volumes, networks."""
        found = []
        for engine in _ENGINES:
            if shutil.which(engine) is None:
                continue
            for kind, field in (("ps", "Names"), ("volume", "Name"), ("network", "Name")):
                listing = ("ps", "-a") if kind == "ps" else (kind, "ls")
                done = subprocess.run(
                    [engine, *listing, "--format", f"{{{{.{field}}}}}"],
                    capture_output=True,
                    text=True,
                    check=False,
                    timeout=60,
                )
                found += [name for name in done.stdout.split() if name.startswith(self.name)]
        return found
