"""Two hosts made of network namespaces: serving across, partitions, wrong keys, restarts."""

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest

from shared.ids import WorkerId
from shared.transport.security import generate_keys
from tests.conftest import RunAsync
from tests.transport.test_worker_processes import LONG, recover, reference
from tests.transport.worker_rig import Rig, make_config, request

pytestmark = pytest.mark.timeout(300)

Runner = Callable[[Coroutine[object, object, None]], None]
SPACE, CABLE = "dtp-p", "dtp-p0"
ADDRESS = {"prefill": "10.213.7.2", "decode": "10.213.7.1"}
PORT = {"prefill": 7400, "decode": 7420}
TRANSFER = {
    "path": "host",
    "notify_layers": 1,
    "lease": "12s",
    "heartbeat": "1s",
    "chunk_size": "4KiB",
    "stall_timeout": "1500ms",
}


def ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, timeout=10, check=False)


@pytest.fixture(scope="module")
def hosts() -> Iterator[None]:
    """The prefill worker's host is a namespace, joined to this one by a cable."""
    if shutil.which("ip") is None or ip("netns", "add", SPACE).returncode != 0:
        pytest.skip("network namespaces need root and iproute2")
    try:
        made = ip("link", "add", CABLE, "type", "veth", "peer", "name", "eth0", "netns", SPACE)
        if made.returncode != 0:
            pytest.skip(f"no veth in this kernel: {made.stderr.strip()}")
        ip("addr", "add", f"{ADDRESS['decode']}/24", "dev", CABLE)
        ip("link", "set", CABLE, "up")
        ip("-n", SPACE, "addr", "add", f"{ADDRESS['prefill']}/24", "dev", "eth0")
        ip("-n", SPACE, "link", "set", "eth0", "up")
        ip("-n", SPACE, "link", "set", "lo", "up")
        yield
    finally:
        ip("netns", "del", SPACE)


@pytest.fixture
def run(run_async: RunAsync) -> Runner:
    return partial(run_async, timeout=280.0)


class TwoHosts(Rig):
    """Starts each worker inside its namespace, with the config file of its own host."""

    def __init__(self, directory: Path, model: Path) -> None:
        keys = str(generate_keys(directory / "keys"))
        self.configs = {}
        for role, address in ADDRESS.items():
            place = directory / role
            place.mkdir()
            self.configs[role] = make_config(
                place,
                model,
                split=True,
                transfer=TRANSFER,
                endpoints={
                    "router_workers": f"tcp://{ADDRESS['decode']}:5610",
                    "kv": f"tcp://0.0.0.0:{PORT[role]}",
                    "advertise": address,
                },
                security={"keys": keys},
            )
        super().__init__(self.configs["prefill"])

    def start(self, name: str, config: Path | None = None) -> None:
        role = name.partition("-")[0]
        service = [sys.executable, "-m", f"services.{role}", "--name", name, "--die-with-parent"]
        inside = ("ip", "netns", "exec", SPACE) if role == "prefill" else ()
        self.processes[name] = subprocess.Popen(
            [*inside, *service, "--config", str(config or self.configs[role])],
            cwd=Path(__file__).parents[2],
            stderr=subprocess.PIPE,
        )

    def cable(self, state: str) -> None:
        """Set the cable ``down`` or ``up``."""
        assert ip("link", "set", CABLE, state).returncode == 0


async def with_hosts(
    directory: Path, model: Path, test: Callable[[TwoHosts], Coroutine[object, object, None]]
) -> None:
    router = TwoHosts(directory, model)
    try:
        router.start("prefill-0")
        router.start("decode-0")
        await router.ready("prefill-0", "decode-0")
        await test(router)
    except BaseException:
        for process in router.processes.values():
            process.kill()
            process.communicate()
        router.processes.clear()
        raise
    finally:
        await router.close()


@pytest.mark.usefixtures("hosts")
def test_serving_across_two_hosts_a_partition_and_a_restart(
    run: Runner, model: Path, directory: Path
) -> None:
    """Guards wrong tokens and lasting harm after 5 s without network (14, 15), and after the
    peer came back at the same address (3)."""

    async def check(router: TwoHosts) -> None:
        right = reference(model, LONG, 8)
        _, second = router.split(request(LONG, 8))
        assert await router.output(second) == right
        assert router.hellos[WorkerId("prefill-0")][1].kv_endpoint == "tcp://10.213.7.2:7400"

        _, second = router.split(request(LONG, 8))
        await asyncio.sleep(0.3)
        router.cable("down")
        await asyncio.sleep(5.0)
        router.cable("up")
        await recover(router, second, "prefill-0")
        assert await router.output(second) == right

        router.kill("prefill-0")
        router.start("prefill-0")
        await router.ready("prefill-0")
        _, second = router.split(request(LONG, 8))
        assert await router.output(second) == right
        for worker in ("prefill-0", "decode-0"):
            load = await router.settled(worker)
            assert load.blocks_free + load.blocks_cached == load.blocks_total
        peer = router.hellos[WorkerId("decode-0")][0]
        await router.until(lambda: bool(router.reports[peer].pairs))
        assert router.reports[peer].pairs[0].path == "host"

    run(with_hosts(directory, model, check))


@pytest.mark.usefixtures("hosts")
def test_a_host_with_a_wrong_key_gets_nothing(run: Runner, model: Path, directory: Path) -> None:
    """Guards KV and control links open to whoever reaches the port (67)."""

    async def check(router: TwoHosts) -> None:
        router.kill("decode-0")
        stranger = directory / "stranger"
        stranger.mkdir()
        tree = msgspec.yaml.decode(router.configs["decode"].read_bytes())
        keys = generate_keys(stranger / "keys")  # its own pair, but the fleet's server key
        shutil.copy(directory / "keys" / "server.public", keys / "server.public")
        tree["security"] = {"keys": str(keys)}
        config = stranger / "rig.yaml"
        config.write_bytes(msgspec.yaml.encode(tree))
        router.start("decode-0", config)
        await router.until(lambda: router.link.denied > 0)
        assert WorkerId("decode-0") not in router.hellos

    run(with_hosts(directory, model, check))
