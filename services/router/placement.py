"""Where a request runs: colocated or split, and on which workers. No side effects.

Load is measured in prompt tokens: what waits on a worker plus what this request would add
there. A cached prefix therefore attracts a request exactly as long as the queue in front of it
is shorter than what it saves.
"""

from collections.abc import Iterable, Sequence

from msgspec import Struct

from services.router.config import RouterConfig
from services.router.records import OpenRequest, Worker
from shared.errors import ErrorPayload
from shared.ids import BlockHash
from shared.kv.hashing import HashChain
from shared.messages.fleet import Role

MAX_PREDICTED_GROWTH = 1024
"""Output tokens reserved ahead at most; what grows beyond is charged as it grows."""

STREAM_COST = 32
"""What one running stream slows a prefill beside it, in prompt tokens."""

SPILL_FACTOR = 2
"""A decode worker computes prompts so many times slower than an idle prefill worker."""

STREAM_REST = 128
"""What a decode worker has still to do for a sequence, in prompt tokens that take it as long: some
32 tokens more, of 1 to 2 ms each beside others, where a prompt's take 0.5."""


class Pair(Struct, frozen=True):
    """Split: both workers have room."""

    prefill: Worker
    decode: Worker
    reason: str


class Local(Struct, frozen=True):
    """Both phases on one worker."""

    worker: Worker
    reason: str


class Wait(Struct, frozen=True):
    """Nothing can be started now. ``absent``: no worker of a needed role is ready."""

    absent: bool
    reason: str


class Refuse(Struct, frozen=True):
    """Policy says that this request fails."""

    reason: str
    error: ErrorPayload


Placement = Pair | Local | Wait | Refuse


class Need(Struct, frozen=True):
    """What a request asks of a worker; ``tokens`` are prompt and resumed output."""

    tokens: int
    growth: int
    hashes: Sequence[BlockHash]
    block_size: int

    @property
    def prefill_blocks(self) -> int:
        return blocks_for(self.tokens + 1, self.block_size)

    @property
    def decode_blocks(self) -> int:
        return blocks_for(self.tokens + max(1, self.growth), self.block_size)

    def uncached(self, worker: Worker) -> int:
        """Prompt tokens this worker would have to compute; the last one always."""
        return max(1, self.tokens - worker.prefix.match(self.hashes) * self.block_size)


def blocks_for(tokens: int, block_size: int) -> int:
    """Return the number of blocks that hold ``tokens``."""
    return -(-tokens // block_size)


def need_of(request: OpenRequest, worker: Worker) -> Need:
    """Measure a request for a fleet like ``worker`` (block size and length limit)."""
    block_size = worker.hello.compatibility.block_size
    tokens = request.num_tokens
    if request.chain is None or request.chain_block_size != block_size:
        request.chain = HashChain(block_size, request.request.tenant)
        request.chain_block_size = block_size
        request.chain.extend(request.request.prompt_ids)
    left = request.request.sampling.max_tokens - request.num_output
    growth = min(left, MAX_PREDICTED_GROWTH, worker.hello.max_model_len - tokens)
    return Need(tokens, max(0, growth), hashes_of(request), block_size)


def hashes_of(request: OpenRequest) -> Sequence[BlockHash]:
    """Return the hashes of the full blocks of prompt and output so far.

    Empty before the request was first measured.
    """
    chain = request.chain
    if chain is None:
        return ()
    hashed = chain.num_tokens - len(request.request.prompt_ids)
    if hashed < request.num_output:
        chain.extend(request.output_ids()[hashed:])
    return chain.hashes


def has_room(worker: Worker, blocks: int) -> bool:
    """Whether a worker can take a sequence of so many blocks beside what it has.

    One that is larger than the whole pool may run alone: the worker preempts and says so.
    """
    total = worker.hello.blocks_total
    return (
        len(worker.legs) < worker.hello.max_sequences
        and worker.committed_blocks + min(blocks, total) <= total
    )


def can_decode(worker: Worker, config: RouterConfig) -> bool:
    """Whether requests can end on this worker now: without one, none can even begin."""
    if worker.health != "ready":
        return False
    if config.deployment_type == "colocated":
        return worker.role == "mixed"
    return worker.role != "prefill"


def place(
    request: OpenRequest, workers: Sequence[Worker], config: RouterConfig, *, settled: bool
) -> Placement:
    """Choose for one request. ``settled`` False: prefill workers may still be on their way."""
    decoders = [worker for worker in workers if can_decode(worker, config)]
    if not decoders:
        return Wait(absent=True, reason="no_worker")
    need = need_of(request, decoders[0])
    local = _best_local(decoders, need, request.avoid)
    if local is None:
        return Wait(absent=False, reason="busy")
    if config.deployment_type == "colocated":
        return Local(local, "colocated")
    if not request.request.force_split:
        if need.tokens < config.split_threshold:
            return Local(local, "short_prompt")
        if need.uncached(local) < config.split_threshold:
            return Local(local, "cached_prefix")
    prefills = of_role(workers, "prefill")
    if not prefills:
        return _no_prefill(local, config, settled)
    large_enough = [w for w in prefills if w.hello.blocks_total >= need.prefill_blocks]
    if not large_enough and local.hello.blocks_total >= need.prefill_blocks:
        return Local(local, "prefill_too_small")
    prefill = best_prefill(large_enough or prefills, need, request.avoid)
    if prefill is None:
        return Wait(absent=False, reason="busy")
    if not request.request.force_split and _spills(prefill, local, need, config):
        return Local(local, "prefill_backlog")
    return Pair(prefill, _best_decode(decoders, need, request.avoid), "split")


def _spills(prefill: Worker, local: Worker, need: Need, config: RouterConfig) -> bool:
    """Whether the prompt had better be computed beside the decodes (Dynamo's local prefill).

    Only once prefill is behind by ``spill_tokens``, as every chunk delays the streams there: a
    worker that has many of them, or is about to, has no time to give.
    """
    behind = prefill.pending_tokens
    there = need.uncached(local) + local.pending_tokens + STREAM_REST * len(local.legs)
    return (
        config.spill_tokens is not None
        and behind > config.spill_tokens
        and SPILL_FACTOR * there < behind
    )


def of_role(workers: Iterable[Worker], role: Role) -> list[Worker]:
    """Return the ready workers of a role."""
    return [worker for worker in workers if worker.role == role and worker.health == "ready"]


def best_prefill(workers: list[Worker], need: Need, avoid: set[bytes]) -> Worker | None:
    """Return the worker that would have this prompt computed first, None if all are full."""
    fitting = _prefer([w for w in workers if has_room(w, need.prefill_blocks)], avoid)
    return min(
        fitting,
        key=lambda w: (w.pending_tokens + need.uncached(w), w.last_used),
        default=None,
    )


def _best_local(workers: list[Worker], need: Need, avoid: set[bytes]) -> Worker | None:
    fitting = _prefer([w for w in workers if has_room(w, need.decode_blocks)], avoid)
    return min(
        fitting,
        key=lambda w: (
            w.pending_tokens + need.uncached(w) + STREAM_COST * len(w.legs),
            w.last_used,
        ),
        default=None,
    )


def _best_decode(workers: list[Worker], need: Need, avoid: set[bytes]) -> Worker:
    """Return the worker with the smallest share of its KV promised, growth included.

    At least one has room: the caller has found a local candidate by the same measure.
    """
    fitting = _prefer([w for w in workers if has_room(w, need.decode_blocks)], avoid)
    return min(
        fitting,
        key=lambda w: (
            (w.committed_blocks + need.decode_blocks) / w.hello.blocks_total,
            len(w.legs),
            w.last_used,
        ),
    )


def _prefer(workers: list[Worker], avoid: set[bytes]) -> list[Worker]:
    """Leave out the workers to avoid, unless nobody else is there."""
    return [worker for worker in workers if worker.peer not in avoid] or workers


def _no_prefill(local: Worker, config: RouterConfig, settled: bool) -> Placement:
    if not settled:
        return Wait(absent=True, reason="settling")
    if config.on_no_prefill == "wait":
        return Wait(absent=True, reason="no_prefill_wait")
    if config.on_no_prefill == "local":
        return Local(local, "no_prefill_local")
    return Refuse(
        "no_prefill_fail",
        ErrorPayload(
            code="no_worker",
            message="no prefill worker is ready and `router.on_no_prefill` is `fail`",
            retryable=True,
            retry_after=1.0,
        ),
    )
