"""Workers on two hosts: prefill-0 in a network namespace, the rest in this one."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from shared.errors import ResourceMissing
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


@contextmanager
def cabled(hosts: Hosts) -> Iterator[Hosts]:
    """Join the namespace of ``hosts`` to this one by a cable as long as the context lasts.

    Raises:
        ResourceMissing: no rights, no ``ip``, no namespaces or no veth devices here, or another run
            of the tests has one of that name.
    """
    space, cable = hosts.space, f"{hosts.space}0"
    if shutil.which("ip") is None:
        raise ResourceMissing("network namespaces need iproute2")
    added = _ip("netns", "add", space)
    if added.returncode != 0:
        raise ResourceMissing(f"no network namespace, which needs root: {added.stderr.strip()}")
    try:
        made = _ip(
            *("link", "add", cable, "type", "veth"),
            *("peer", "name", hosts.device, "netns", space),
        )
        if made.returncode != 0:
            raise ResourceMissing(f"no veth in this kernel: {made.stderr.strip()}")
        _ip("addr", "add", f"{hosts.near}/24", "dev", cable)
        _ip("link", "set", cable, "up")
        _ip("-n", space, "addr", "add", f"{hosts.far}/24", "dev", hosts.device)
        _ip("-n", space, "link", "set", hosts.device, "up")
        _ip("-n", space, "link", "set", "lo", "up")
        yield hosts
    finally:
        _ip("link", "del", cable)  # what was cut off in there may keep the namespace for minutes
        _ip("netns", "del", space)


def _ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, timeout=10, check=False)


def port_of(role: str, hosts: Hosts) -> int:
    """Return a worker's KV port: this host's is the same for all links, so links have their own.

    Links of processes that run at once differ in the last bits of their pid, four addresses each.
    """
    third, fourth = map(int, hosts.near.split(".")[2:])
    link = (64 * third + fourth // 4) % 240
    return 10_000 + 40 * link + {"prefill": 0, "decode": 20}[role]


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
        launch = self.launches.get(name, ("-m",))
        service = [sys.executable, *launch, f"services.{role}", "--name", name, "--die-with-parent"]
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
