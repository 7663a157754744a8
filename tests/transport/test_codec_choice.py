"""``transfer.codec: auto``: one reader, a source behind a slow link and one on its own host."""

from pathlib import Path

import pytest

from shared.errors import ResourceMissing
from shared.ids import WorkerId
from shared.messages.fleet import PairStatus
from tests.conftest import RunAsync
from tests.transport.two_hosts import TwoHosts
from tests.transport.worker_rig import make_model, request, running
from tools.slow_link.hosts import WIRE_MTU, slow_link
from tools.slow_link.shaping import LinkProfile

pytestmark = pytest.mark.timeout(300)

SLOW = LinkProfile(rate=8e6, delay=1e-3)
LOSSY = ("int8", "k8v4", "k4v4")
TOKENS = 160
CHUNK = "24KiB"
"""So small that codecs, which cost the same for every chunk, are at least twice as slow as loopback
whatever else the machine does, and still faster than the slow link."""
SETTLED = 3
"""Hand-overs in a row with one answer; every 16th travels plain, to measure the link anew."""
MOST = 40


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with 8 KiB of KV per token."""
    return make_model(tmp_path_factory.mktemp("wide"), hidden=512)


async def hand_over(router: TwoHosts, source: str, number: int) -> PairStatus:
    """Move the KV of a prompt that was never seen and return what the status says then."""
    first = 3 + (source == "prefill-0")
    prompt = (first, 5 + number, *(5 + i % 80 for i in range(TOKENS)))
    _, second = router.split(request(prompt, 2), prefill=source)
    await router.output(second)
    peer = router.hellos[WorkerId("decode-0")][0]

    def lines() -> list[PairStatus]:
        report = router.reports.get(peer)
        pairs = () if report is None else report.pairs
        return [p for p in pairs if p.source == source and p.transfers == number + 1]

    await router.until(lambda: bool(lines()))
    return lines()[0]


async def settles(router: TwoHosts, source: str, wanted: tuple[str, ...]) -> None:
    """Let hand-overs follow one another until the planner stays with one of these codecs."""
    in_a_row = 0
    for number in range(MOST):
        pair = await hand_over(router, source, number)
        assert (pair.path, pair.codec_reason, pair.failed) == ("host", "planned", 0)
        if number == 0:
            assert pair.codec == "none", "nothing is known of the link yet"
            continue
        in_a_row = in_a_row + 1 if pair.codec in wanted else 0
        if in_a_row == SETTLED:
            return
    raise AssertionError(f"{source} does not stay with {wanted}")


def test_a_slow_link_gets_a_codec_and_loopback_none(
    run_async: RunAsync, wide: Path, directory: Path
) -> None:
    """Guards a planner that sends plain bytes over a slow link, or spoils KV and saves nothing."""
    worker = {"count": 1, "precision": "fp32", "kv_memory": "32MiB", "threads": 1}
    transfer = {"path": "host", "codec": "auto", "pipeline": False, "chunk_size": CHUNK}
    workers = {"prefill": worker | {"count": 2}, "decode": worker}

    async def check() -> None:
        with slow_link(SLOW, WIRE_MTU) as hosts:
            router = TwoHosts(directory, wide, hosts, transfer=transfer, workers=workers)
            async with running(router, "prefill-0", "prefill-1", "decode-0"):
                await settles(router, "prefill-0", LOSSY)
                await settles(router, "prefill-1", ("none",))

    try:
        run_async(check(), timeout=280.0)
    except ResourceMissing as error:
        pytest.skip(error.message)
