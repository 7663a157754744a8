"""``diptych doctor``: every check, one line each, and the exit code."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from shared.config import Deployment, load_deployment
from shared.errors import DiptychError
from tools.doctor.advertise import check_advertise
from tools.doctor.deployment import check_machine_for, check_memory
from tools.doctor.devices import check_devices
from tools.doctor.finding import Finding, attempt, fail, ok
from tools.doctor.machine import check_machine
from tools.doctor.model import inspect_model
from tools.doctor.peers import check_peers
from tools.supervise.locks import read_owner
from tools.supervise.plan import run_paths

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def examine(config: Path) -> list[Finding]:
    """Run every check for the deployment file ``config``."""
    findings = check_machine()
    try:
        deployment = load_deployment(config)
    except DiptychError as error:
        return [*findings, *check_devices(None), fail("config", error.message)]
    findings += check_devices(deployment)
    findings.append(ok("config", f"{config}: {deployment.name}, {deployment.deployment_type}"))
    findings += _model(deployment)
    findings += check_peers(deployment) + check_advertise(deployment)
    owner = read_owner(run_paths(deployment).up_lock)
    if owner is not None:
        findings.append(ok("ports", f"{deployment.name} runs as pid {owner.pid} and has them"))
        return findings
    return findings + check_machine_for(deployment)


def _model(deployment: Deployment) -> list[Finding]:
    try:
        files = inspect_model(deployment.model.path)
    except DiptychError as error:
        return [fail("model", error.message)]
    text = f"{files.description}, {files.parameters / 1e6:.0f} M parameters, {files.place}"
    return [
        ok("model", text),
        attempt("memory", lambda: check_memory(deployment, files.parameters)),
    ]


def doctor(config: Path, console: Console) -> int:
    """Print the findings and return 0, or 1 if something would keep the deployment from running."""
    findings = examine(config)
    table = Table(show_header=False, box=None, padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        colour = _COLOURS[finding.level]
        table.add_row(f"[{colour}]{finding.level}[/]", finding.topic, finding.text)
    console.print(table)
    failed = sum(finding.level == "fail" for finding in findings)
    console.print(f"{failed} to fix" if failed else "everything needed is there")
    return 1 if failed else 0
