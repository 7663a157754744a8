"""``kill -9`` of the process that sends KV, at every chunk there is."""

import pytest
import zmq
from msgspec.structs import replace

from shared.kv.codecs.frame import CodecName
from shared.transport.bulk.fetches import Failed, FetchLimits
from shared.transport.bulk.reader import Fetched
from tests.transport.harness import Context
from tests.transport.kv_filling import fill_normal
from tests.transport.mortal_servers import Nursery, Wanted, nursery
from tests.transport.test_bulk_link import BLOCKS, LAYOUT, SOURCE, Ends

HASTY = FetchLimits(slots=4, stall=0.1, attempts=2)
PATIENT = FetchLimits(slots=4, stall=5.0, attempts=4)


def killed_at(
    context: Context, servers: Nursery, codec: CodecName, chunk: int | None, sockets: int = 1
) -> Ends:
    """Fetch from a process that dies at ``chunk``, and check that it is said or all is there."""
    ends = Ends(context, replace(PATIENT if chunk is None else HASTY, sockets=sockets))
    ends.codec = codec
    fill_normal(ends.source, 7)
    served = servers.serve(Wanted(layout=LAYOUT, blocks=BLOCKS, seed=7, kill=chunk))
    assert ends.open(served.endpoint, served.arena).error is None
    outcome = ends.fetch()
    if chunk is None:
        assert isinstance(outcome, Fetched) and (codec != "none" or ends.equal())
    else:
        assert isinstance(outcome, Failed), f"killed at chunk {chunk}: {outcome}"
        assert outcome.error.code == "transfer_failed" and outcome.error.retryable
    ends.reader.drop(SOURCE)
    return ends


@pytest.mark.parametrize(
    ("codec", "chunks", "sockets"), [("none", 9, 1), ("int8", 12, 1), ("none", 9, 3)]
)
def test_a_source_killed_at_any_chunk_is_a_named_failure_and_its_next_life_serves(
    codec: CodecName, chunks: int, sockets: int
) -> None:
    """Guards half a transfer taken for a whole one, whichever half it is (1, 3, 24)."""
    context: Context = zmq.Context()
    with nursery() as servers:
        for chunk in (*range(chunks), None):
            killed_at(context, servers, codec, chunk, sockets).close()
    context.term()
