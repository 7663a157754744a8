"""``diptych bench transfer`` on a small pool, on this host and over a simulated link."""

import msgspec
import pytest

from shared.errors import ResourceMissing
from shared.kv.layout import KvLayout, LayerKv
from tools.bench.transfer import measure
from tools.bench.transfer_nixl import nixl_works
from tools.bench.transfer_plan import TransferPlan
from tools.slow_link.shaping import LinkProfile

LAYOUT = KvLayout(dtype="bf16", block_size=16, layers=(LayerKv(2, 32, 32),) * 4)
PLAN = TransferPlan(
    layout=LAYOUT,
    lengths=(64, 200),
    prefill_rate=4000.0,
    chunk_bytes=16 << 10,
    repeats=1,
    codecs=("none", "int8", "k8v4"),
)


@pytest.mark.keeps("threads")  # torch's
def test_every_path_and_codec_is_measured_and_its_bytes_are_right() -> None:
    """Guards figures of KV that never arrived; ``measure`` compares every byte."""
    rows = measure(PLAN, lambda what: None)
    assert [(r.path, r.codec) for r in rows[:4]] == list(PLAN.movers)
    by_name = {(r.path, r.codec, r.tokens): r for r in rows}
    plain = by_name["host", "none", 200]
    assert plain.wire == plain.bytes == PLAN.size(200)
    assert by_name["host", "int8", 200].wire < 0.6 * plain.wire
    assert by_name["host", "k8v4", 200].wire < by_name["host", "int8", 200].wire
    assert all(r.seconds > 0 and r.visible_off > 0 and r.reference > 0 for r in rows)
    assert plain.of_plain == 1.0


@pytest.mark.keeps("threads")  # torch's
def test_several_sockets_have_a_row_beside_one() -> None:
    """Guards an option that measures the same twice, or loses bytes between its sockets."""
    plan = msgspec.structs.replace(PLAN, lengths=(200,), codecs=("none",), sockets=2)
    rows = measure(plan, lambda what: None)
    assert [(r.path, r.codec) for r in rows] == list(plan.movers)
    assert [r.path for r in rows] == ["ipc", "host", "host x2"]
    assert rows[2].wire == rows[2].bytes == PLAN.size(200) and rows[2].of_plain == 1.0


@pytest.mark.keeps("threads")  # torch's
def test_a_simulated_link_carries_every_byte_and_is_removed() -> None:
    """Guards a link that spoils what it carries, and namespaces left behind."""
    link = LinkProfile(rate=125e6, delay=1e-3, loss=0.01)
    plan = msgspec.structs.replace(PLAN, lengths=(64,), codecs=("none", "int8"), link=link)
    try:
        rows = measure(plan, lambda what: None)
    except ResourceMissing as error:
        pytest.skip(error.message)
    assert [(r.path, r.codec) for r in rows] == [("host", "none"), ("host", "int8")]
    assert all(
        r.of_link == pytest.approx(r.wire / r.seconds / link.rate) and r.of_link > 0 for r in rows
    )


@pytest.mark.keeps("threads")  # torch's, and UCX's
@pytest.mark.skipif(not nixl_works(), reason="pip install .[nixl]")
def test_nixl_has_a_row_where_it_is_installed() -> None:
    """Guards a path that is never measured; ``measure`` compares every byte."""
    plan = msgspec.structs.replace(PLAN, lengths=(200,), codecs=("none",), nixl=True)
    rows = measure(plan, lambda what: None)
    assert [r.path for r in rows] == ["ipc", "host", "nixl"]
    assert rows[2].wire == rows[2].bytes == PLAN.size(200)
