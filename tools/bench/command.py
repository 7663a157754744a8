"""From the command line's words to a finished report, with or without an own deployment."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.console import Console

from shared.config import Deployment
from shared.errors import BadConfig, ResourceMissing
from tools.bench.cpu import control_pids
from tools.bench.report import Server, make_report, render_table, write_report
from tools.bench.serve import Plan, measure, served_model
from tools.bench.sse_client import Target
from tools.bench.terminal import print_table
from tools.supervise.locks import read_owner
from tools.supervise.observe import Ready
from tools.supervise.plan import run_paths

_STOP_TIMEOUT = 180.0


def parse_levels(text: str) -> tuple[int, ...]:
    """Read ``1,8,16``. Raises ``BadConfig``."""
    try:
        levels = tuple(int(part) for part in text.split(","))
    except ValueError:
        levels = ()
    if not levels or min(levels) < 1:
        raise BadConfig(f"--concurrency wants numbers such as 1,8,16, not {text!r}")
    return levels


def read_api_key(path: Path) -> str:
    """Read a key from a file of one line. Raises ``BadConfig``."""
    try:
        key = path.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadConfig(f"--api-key-file {path}: {error}") from error
    if not key or not all("!" <= character <= "~" for character in key):
        raise BadConfig(f"--api-key-file {path} must hold one key and nothing else")
    return key


def bench_url(url: str, api_key: str | None, plan: Plan, console: Console, out: Path) -> int:
    """Measure any OpenAI server."""
    server = Server(url=url, api_key=api_key, load=os.getloadavg()[0])
    return _bench(server, plan, console, out)


def bench_deployment(
    deployment: Deployment, config: Path | None, plan: Plan, console: Console, out: Path
) -> int:
    """Measure a deployment of this machine; it is started for the time being if none runs."""
    load = os.getloadavg()[0]
    with contextlib.ExitStack() as stack:
        if read_owner(run_paths(deployment).up_lock) is None:
            if config is None:
                raise ResourceMissing(
                    "no deployment runs; start one with `diptych up`, "
                    "or let this command do it with --config FILE"
                )
            stack.enter_context(started(deployment, config, console))
        url = gateway_url(deployment)
        key = next(iter(deployment.gateway.api_keys or {}), None)
        server = Server(url=url, api_key=key, load=load, deployment=deployment)
        return _bench(server, plan, console, out)


def _bench(server: Server, plan: Plan, console: Console, out: Path) -> int:
    try:
        target = Target.parse(server.url, server.api_key)
    except ValueError as error:
        raise BadConfig(str(error)) from error
    model = served_model(server.url, server.api_key)
    control = [] if server.deployment is None else control_pids(server.deployment)
    levels = measure(target, model, plan, control, console)
    report = make_report(server, model, plan, levels)
    print_table(render_table(report), console)
    as_json, as_html = write_report(report, out)
    console.print(f"{as_json}\n{as_html}", soft_wrap=True, highlight=False)
    failed = sum(level.failed for level in levels)
    for problem in sorted({problem for level in levels for problem in level.errors}):
        console.print(f"failed: {problem}", style="red", markup=False)
    return 1 if failed else 0


def default_output() -> Path:
    """Return ``reports/serve-DATE`` in the working directory."""
    return Path("reports") / time.strftime("serve-%Y%m%d-%H%M%S")


def gateway_url(deployment: Deployment) -> str:
    """Return where the deployment's API answers. Raises ``ResourceMissing``."""
    try:
        content = run_paths(deployment).ready("gateway").read_bytes()
        url = msgspec.json.decode(content, type=Ready).url
    except (OSError, msgspec.MsgspecError) as error:
        raise ResourceMissing(f"the gateway of `{deployment.name}` is not ready") from error
    if url is None:
        raise ResourceMissing("the gateway's ready file names no url")
    return url


@contextlib.contextmanager
def started(deployment: Deployment, config: Path, console: Console) -> Iterator[None]:
    """Run ``diptych up`` beside us, until it introduced itself."""
    command = [sys.executable, "-P", "-m", "tools", "up", "--die-with-parent", str(config)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            console.print(line.rstrip(), markup=False, highlight=False, soft_wrap=True)
            if "stop: Ctrl-C" in line:
                break
        else:
            raise ResourceMissing(f"deployment `{deployment.name}` did not start")
        yield
    finally:
        process.terminate()
        process.communicate(timeout=_STOP_TIMEOUT)
