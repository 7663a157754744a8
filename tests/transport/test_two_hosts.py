"""Two hosts made of network namespaces: serving across, partitions, wrong keys, restarts."""

import asyncio
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest

from shared.ids import WorkerId
from shared.transport.security import generate_keys
from tests.conftest import RunAsync
from tests.transport.test_worker_processes import LONG, recover, reference
from tests.transport.two_hosts import Runner, TwoHosts, port_of, with_hosts
from tests.transport.worker_rig import request
from tools.slow_link.hosts import Hosts

pytestmark = pytest.mark.timeout(300)

SPACE, CABLE = "dtp-p", "dtp-p0"
PLACE = Hosts(SPACE, "eth0", "10.213.7.1", "10.213.7.2")


def ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, timeout=10, check=False)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """The prefill worker's host is a namespace, joined to this one by a cable."""
    if shutil.which("ip") is None or ip("netns", "add", SPACE).returncode != 0:
        pytest.skip("network namespaces need root and iproute2")
    try:
        made = ip("link", "add", CABLE, "type", "veth", "peer", "name", "eth0", "netns", SPACE)
        if made.returncode != 0:
            pytest.skip(f"no veth in this kernel: {made.stderr.strip()}")
        ip("addr", "add", f"{PLACE.near}/24", "dev", CABLE)
        ip("link", "set", CABLE, "up")
        ip("-n", SPACE, "addr", "add", f"{PLACE.far}/24", "dev", "eth0")
        ip("-n", SPACE, "link", "set", "eth0", "up")
        ip("-n", SPACE, "link", "set", "lo", "up")
        yield PLACE
    finally:
        ip("netns", "del", SPACE)


@pytest.fixture
def run(run_async: RunAsync) -> Runner:
    return partial(run_async, timeout=280.0)


def test_serving_across_two_hosts_a_partition_and_a_restart(
    run: Runner, model: Path, directory: Path, hosts: Hosts
) -> None:
    """Guards wrong tokens and lasting harm after 5 s without network (14, 15), and after the
    peer came back at the same address (3)."""

    async def check(router: TwoHosts) -> None:
        right = reference(model, LONG, 8)
        _, second = router.split(request(LONG, 8))
        assert await router.output(second) == right
        port = port_of("prefill", hosts)
        hello = router.hellos[WorkerId("prefill-0")][1]
        assert hello.kv_endpoint == f"tcp://{hosts.far}:{port}"

        _, second = router.split(request(LONG, 8))
        await asyncio.sleep(0.3)
        hosts.cable("down")
        await asyncio.sleep(5.0)
        hosts.cable("up")
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

    run(with_hosts(directory, model, hosts, check))


def test_a_host_with_a_wrong_key_gets_nothing(
    run: Runner, model: Path, directory: Path, hosts: Hosts
) -> None:
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

    run(with_hosts(directory, model, hosts, check))
