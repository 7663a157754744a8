"""Two hosts made of network namespaces: serving across, partitions, wrong keys, restarts."""

import asyncio
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest

from shared.errors import ResourceMissing
from shared.ids import WorkerId
from shared.transport.security import generate_keys
from tests.conftest import RunAsync
from tests.transport.test_worker_processes import LONG, losses, recover, reference
from tests.transport.two_hosts import Runner, TwoHosts, cabled, port_of, with_hosts
from tests.transport.worker_rig import request
from tools.slow_link.hosts import Hosts

pytestmark = pytest.mark.timeout(300)

PLACE = Hosts("dtp-p", "eth0", "10.213.7.1", "10.213.7.2")


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """The prefill worker's host is a namespace, joined to this one by a cable."""
    try:
        with cabled(PLACE) as made:
            yield made
    except ResourceMissing as error:
        pytest.skip(error.message)


@pytest.fixture
def run(run_async: RunAsync) -> Runner:
    return partial(run_async, timeout=280.0)


def test_serving_across_two_hosts_a_partition_and_a_restart(
    run: Runner, model: Path, directory: Path, hosts: Hosts
) -> None:
    """Guards wrong tokens and lasting harm after 5 s without network (14, 15), a cut that stops
    others than those behind it, and harm after the peer came back at the same address (3)."""
    # Chunk 120 is one of the second request: there the far worker stops, so that the cut hits it.
    stall = {"kind": "stall", "chunk": 120, "delay": "3s", "worker": "prefill-0"}
    short, fresh, meanwhile = LONG[9:99], LONG[5:305], [LONG[at : at + 60] for at in range(20, 28)]

    async def check(router: TwoHosts) -> None:
        right = {p: reference(model, p, 8) for p in (short, LONG, fresh, *meanwhile)}
        router.start("prefill-1")
        await router.ready("prefill-1")
        _, second = router.split(request(short, 8))
        assert await router.output(second) == right[short]
        port = port_of("prefill", hosts)
        hello = router.hellos[WorkerId("prefill-0")][1]
        assert hello.kv_endpoint == f"tcp://{hosts.far}:{port}"

        _, second = router.split(request(LONG, 8))
        peer = router.hellos[WorkerId("decode-0")][0]
        await router.until(lambda: router.reports[peer].load.receiving > 0)
        hosts.cable("down")
        for prompt in meanwhile:
            _, other = router.split(request(prompt, 8), prefill="prefill-1")
            await asyncio.sleep(5.0 / len(meanwhile))
            assert await router.output(other) == right[prompt], "a pair on this side of the cut"
        assert second not in router.ended, "it was to be under way"
        hosts.cable("up")
        await recover(router, second, "prefill-0")
        assert await router.output(second) == right[LONG]

        router.kill("prefill-0")
        router.start("prefill-0")
        await router.ready("prefill-0")
        _, second = router.split(request(fresh, 8))
        assert await router.output(second) == right[fresh]
        for worker in ("prefill-0", "prefill-1", "decode-0"):
            load = await router.settled(worker)
            assert load.blocks_free + load.blocks_cached == load.blocks_total
        await router.until(lambda: len(router.reports[peer].pairs) == 2)
        far, near_pair = router.reports[peer].pairs
        assert (far.source, near_pair.source) == ("prefill-0", "prefill-1")
        assert far.path == near_pair.path == "host"
        assert near_pair.failed == near_pair.chunks_again == 0
        assert near_pair.transfers == len(meanwhile)

    run(with_hosts(directory, model, hosts, check, faults={"chunks": [stall]}))


def test_a_host_of_another_release_or_with_a_wrong_key_gets_nothing(
    run: Runner, model: Path, directory: Path, hosts: Hosts
) -> None:
    """Guards KV and control links open to whoever reaches the port (67), and a half-updated
    fleet that is met with silence (45)."""

    async def check(router: TwoHosts) -> None:
        router.launches["decode-0"] = ("-m", "tests.transport.later_worker")
        router.start("decode-0")
        await router.ready("decode-0")
        pair = router.split(request(LONG[:40]))
        await router.until(lambda: bool(losses(router)))
        router.cancel(*pair)
        (loss,) = losses(router)
        assert loss.error.message == (
            "prefill-0 and decode-0 do not fit: wire_version: 1 here, 2 there; install the "
            "same release on both sides"
        )
        router.kill("decode-0")

        stranger = directory / "stranger"
        stranger.mkdir()
        tree = msgspec.yaml.decode(router.configs["decode"].read_bytes())
        keys = generate_keys(stranger / "keys")  # its own pair, but the fleet's server key
        shutil.copy(directory / "keys" / "server.public", keys / "server.public")
        tree["security"] = {"keys": str(keys)}
        config = stranger / "rig.yaml"
        config.write_bytes(msgspec.yaml.encode(tree))
        router.launches.clear()
        router.start("decode-0", config)
        await router.until(lambda: router.link.denied > 0)
        assert WorkerId("decode-0") not in router.hellos

    run(with_hosts(directory, model, hosts, check, names=("prefill-0",)))
