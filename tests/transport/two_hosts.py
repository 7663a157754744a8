"""Workers on two hosts: prefill-0 in a network namespace, the rest in this one."""

import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Final

from shared.transport.security import generate_keys
from tests.transport.worker_rig import Rig, make_config, running
from tools.slow_link.hosts import Hosts

Runner = Callable[[Coroutine[object, object, None]], None]
TRANSFER: Final[dict[str, object]] = {
    "path": "host",
    "notify_layers": 1,
    "lease": "12s",
    "heartbeat": "1s",
    "chunk_size": "4KiB",
    "stall_timeout": "1500ms",
}


def port_of(role: str, hosts: Hosts) -> int:
    """Return a worker's KV port: this host's is the same for all links, so links have their own."""
    return 40 * int(hosts.near.split(".")[2]) + {"prefill": 7120, "decode": 7140}[role]


class TwoHosts(Rig):
    """Starts each worker inside its namespace, with the config file of its own host."""

    def __init__(self, directory: Path, model: Path, hosts: Hosts, **changes: object) -> None:
        self.hosts = hosts
        keys = str(generate_keys(directory / "keys"))
        self.configs = {}
        for role, address in (("prefill", hosts.far), ("decode", hosts.near)):
            place = directory / role
            place.mkdir()
            self.configs[role] = make_config(
                place,
                model,
                split=True,
                **{
                    "transfer": TRANSFER,
                    "endpoints": {
                        "router_workers": f"tcp://{hosts.near}:5610",
                        "kv": f"tcp://0.0.0.0:{port_of(role, hosts)}",
                        "advertise": address,
                    },
                    "security": {"keys": keys},
                    **changes,
                },
            )
        super().__init__(self.configs["prefill"])

    def start(self, name: str, config: Path | None = None) -> None:
        role = name.partition("-")[0]
        service = [sys.executable, "-m", f"services.{role}", "--name", name, "--die-with-parent"]
        far = name == "prefill-0"
        config = config or self.configs["prefill" if far else "decode"]
        self.processes[name] = subprocess.Popen(
            [*(self.hosts.inside if far else ()), *service, "--config", str(config)],
            cwd=Path(__file__).parents[2],
            stderr=subprocess.PIPE,
        )


async def with_hosts(
    directory: Path,
    model: Path,
    hosts: Hosts,
    test: Callable[[TwoHosts], Coroutine[object, object, None]],
    names: tuple[str, ...] = ("prefill-0", "decode-0"),
    **changes: object,
) -> None:
    """Run a test with workers that said hello, by default one prefill and one decode worker.

    ``changes`` are those of ``make_config``, to both hosts' files.
    """
    router = TwoHosts(directory, model, hosts, **changes)
    async with running(router, *names):
        await test(router)
