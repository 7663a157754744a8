"""The sentences for a KV pool that does not hold what may be asked of it."""

from shared.kv.block_pool import BlockPool
from shared.kv.layout import KvLayout
from shared.messages.fleet import Role
from shared.worker.settings import WorkerSettings

_MIB = 1 << 20
_REFUSED = "longer ones than it holds are refused or end early"
_LONGER: dict[Role, str] = {
    "prefill": "longer prompts than it holds are left to decode workers",
    "decode": _REFUSED,
    "mixed": _REFUSED,
}


def shortage(
    settings: WorkerSettings, layout: KvLayout, num_blocks: int, longest: int
) -> str | None:
    """Say what it means that a pool holds less than one sequence of ``longest`` tokens.

    ``num_blocks`` of those that ``kv_memory`` has room for are for sequences. None: it holds one.
    """
    tokens = num_blocks * layout.block_size
    if tokens >= longest:
        return None
    spare = settings.kv_memory // layout.block_bytes - num_blocks
    needed = layout.sequence_bytes(longest) + spare * layout.block_bytes
    return (
        f"`workers.{settings.role}.kv_memory` of {settings.kv_memory / _MIB:.4g} MiB holds "
        f"{tokens} tokens, and a request may have {longest}: {_LONGER[settings.role]}; set it to "
        f"{-(-needed // _MIB)}MiB, or `model.max_model_len` to {tokens}"
    )


def never_fits(tokens: int, pool: BlockPool) -> str:
    """Say that a pool cannot hold ``tokens`` even when nothing else is in it."""
    factor = -(-tokens // (pool.num_blocks * pool.block_size))
    return (
        f"{tokens} tokens of prompt and answer exceed the KV memory of this worker "
        f"({pool.num_blocks} blocks of {pool.block_size} tokens): send a shorter prompt, or raise "
        f"`kv_memory` in the deployment file; {factor} times as much is enough"
    )
