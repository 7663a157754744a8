"""Whether decode workers can map and read prefill workers' GPU memory, for each pair of GPUs."""

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Final

import msgspec

from shared.config import Deployment
from shared.messages.prefill_decode import ArenaDescriptor
from tools.doctor.finding import Finding, fail, ok, warn
from tools.doctor.ipc_probe import Probed

_TIMEOUT: Final = 120.0

Try = Callable[[str, str], Probed]
"""From the owner's device and the reader's to what the self-test says."""


def wanted_pair(deployment: Deployment) -> tuple[str, str] | None:
    """Return prefill's and decode's GPU if KV may go between them by CUDA IPC."""
    prefill, decode = deployment.workers.prefill, deployment.workers.decode
    if deployment.deployment_type != "split" or prefill is None or decode is None:
        return None
    if "cpu" in (prefill.device, decode.device) or deployment.transfer.path == "host":
        return None
    return prefill.device, decode.device


def check_pair(deployment: Deployment, attempt: Try) -> list[Finding]:
    """Try what a pair of workers tries when it meets; nothing to say where none would."""
    pair = wanted_pair(deployment)
    if pair is None:
        return []
    where = f"{pair[0]} to {pair[1]}"
    try:
        probed = attempt(*pair)
    except (OSError, subprocess.SubprocessError, msgspec.MsgspecError) as error:
        return [warn("cuda ipc", f"{where}: could not be tried: {error}")]
    if probed.reason is None:
        return [ok("cuda ipc", f"{where}: memory is mapped and read by another process")]
    text = f"{where}: {probed.reason}: {probed.message}"
    if deployment.transfer.path == "ipc":
        return [fail("cuda ipc", text)]
    return [warn("cuda ipc", f"{text}; KV will go by host")]


def probe_processes(owner: str, reader: str) -> Probed:
    """Run the self-test between two processes, as workers are."""
    command = [sys.executable, "-m", "tools.doctor.ipc_probe"]
    with subprocess.Popen(
        [*command, "own", owner], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        patience = threading.Timer(2 * _TIMEOUT, process.kill)
        patience.start()
        try:
            line = process.stdout.readline()
            if not _describes(line):
                return msgspec.json.decode(line, type=Probed)
            done = subprocess.run(
                [*command, "read", reader],
                input=line,
                capture_output=True,
                text=True,
                check=False,
                timeout=_TIMEOUT,
            )
            process.communicate(timeout=_TIMEOUT)
        finally:
            patience.cancel()
            process.kill()
    return msgspec.json.decode(done.stdout, type=Probed)


def _describes(line: str) -> bool:
    try:
        msgspec.json.decode(line, type=ArenaDescriptor)
    except msgspec.MsgspecError:
        return False
    return True
