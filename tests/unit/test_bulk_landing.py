"""What a reader does with a chunk whose checksum is right and whose size is not the planned one."""

import msgspec
import numpy as np
import pytest

from shared.kv.arena import KvArena
from shared.kv.layout import KvLayout, LayerKv
from shared.messages.bulk import Chunk
from shared.transport.bulk.landing import Landing, OpenJob
from shared.transport.bulk.payload import checksum
from shared.transport.bulk.plan import plan_chunks
from shared.transport.bulk.rates import PairRates

LAYOUT = KvLayout(dtype="bf16", block_size=4, layers=(LayerKv(2, 8, 8),))


@pytest.mark.parametrize("claims", ["planned", "real"])
@pytest.mark.parametrize("wrong", [-64, -1, 1, 64])
def test_a_chunk_of_another_size_is_never_written(wrong: int, claims: str) -> None:
    """Guards the pool against a sender that cuts KV otherwise, whatever it vouches for (37, 41)."""
    target = KvArena.create(LAYOUT, 4)
    before = [part.copy() for part in target.raw(0)]
    plan = plan_chunks(LAYOUT, range(1), 2, 4096)
    job = OpenJob(LAYOUT, (1, 2), plan, plan[0].size, "none", 8, PairRates(()))
    landing = Landing(target)

    payload = [memoryview(bytes([7]) * (plan[0].size + wrong))]
    size = plan[0].size if claims == "planned" else len(payload[0])
    header = Chunk(job=1, attempt=1, index=0, size=size, checksum=checksum(payload))
    refused = landing.put(job, header, payload)
    assert refused == f"came with {len(payload[0])} of {plan[0].size} bytes"
    assert all(np.array_equal(a, b) for a, b in zip(before, target.raw(0), strict=True))
    assert job.wire == 0

    whole = [memoryview(bytes([7]) * plan[0].size)]
    right = msgspec.structs.replace(header, size=plan[0].size, checksum=checksum(whole))
    assert landing.put(job, right, whole) is None
    assert all((part[1:3] == 7).all() for part in target.raw(0))
    landing.close()
    target.close()
