"""The supervisor configuration says what the process contract needs."""

import configparser
import shlex
from pathlib import Path

import msgspec

from shared.config import Deployment
from tools.supervise.plan import RunPaths, processes, render_conf

SPLIT = {
    "name": "t",
    "deployment_type": "split",
    "workers": {"prefill": {"count": 2}, "decode": {"count": 1}},
    "router": {"drain_timeout": 7.0},
}
MIXED = {"name": "t", "deployment_type": "colocated", "workers": {"mixed": {"count": 1}}}


def render(tree: object, root: str = "/run/t") -> configparser.ConfigParser:
    deployment = msgspec.convert(tree, Deployment)
    text = render_conf(
        deployment,
        Path("/etc/a b%.yaml"),
        RunPaths(root=Path(root)),
        parent=42,
        directory=Path("/work dir"),
    )
    parser = configparser.ConfigParser()
    parser.read_string(text)
    return parser


def test_every_process_has_a_section() -> None:
    conf = render(SPLIT)
    names = [name.removeprefix("program:") for name in conf.sections() if "program" in name]
    assert names == ["prefill-0", "prefill-1", "decode-0", "router", "gateway"]
    assert conf["group:workers"]["programs"] == "prefill-0,prefill-1,decode-0"


def test_threads_on_borrowed_cores_do_not_spin_there() -> None:
    """They took half of a core for some ms from the worker it belongs to."""
    conf = render(SPLIT)
    assert conf["program:decode-0"]["environment"] == 'GOMP_SPINCOUNT="1000"'


def test_colocated_workers_run_the_decode_service() -> None:
    deployment = msgspec.convert(MIXED, Deployment)
    assert [(p.name, p.module) for p in processes(deployment)] == [
        ("mixed-0", "services.decode"),
        ("router", "services.router"),
        ("gateway", "services.gateway"),
    ]


def test_stop_order_and_patience() -> None:
    """Guards: gateway before router before workers, none killed while it may still drain."""
    conf = render(SPLIT)
    priority = {
        name: int(conf[section]["priority"])
        for name, section in (
            ("gateway", "program:gateway"),
            ("router", "program:router"),
            ("workers", "group:workers"),
        )
    }
    assert priority["gateway"] > priority["router"] > priority["workers"]
    assert int(conf["program:decode-0"]["stopwaitsecs"]) > 7


def test_a_refusal_is_not_restarted_but_everything_else_is() -> None:
    program = render(SPLIT)["program:router"]
    assert program["autorestart"] == "unexpected"
    assert program["exitcodes"] == "2"


def test_paths_with_blanks_and_percent_signs_survive() -> None:
    command = shlex.split(render(SPLIT)["program:router"]["command"])
    assert "/etc/a b%.yaml" in command
    assert command[-2:] == ["--die-with-parent", "42"]
    assert "42" in command[4:6]


def test_the_pid_file_is_no_device() -> None:
    """Guards: supervisord unlinks its pid file at exit, /dev/null must not be it."""
    assert render(SPLIT)["supervisord"]["pidfile"] == "/run/t/supervisor.pid"
