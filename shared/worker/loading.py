"""From settings to a checked model and the memory of its KV."""

from pathlib import Path

from shared.device.device import SharedKv
from shared.engine.engine import Engine
from shared.errors import ResourceMissing
from shared.kv.arena import KvArena
from shared.worker.settings import WorkerSettings


def load_engine(settings: WorkerSettings, model_dir: Path, threads: int) -> tuple[Engine, SharedKv]:
    """Load and check the model and take the KV memory; ``threads`` compute the first steps."""
    if settings.device != "cpu":
        return _load_on_device(settings, model_dir, threads)
    engine = Engine.load(
        model_dir,
        precision=settings.precision,
        kv_dtype=settings.kv_dtype,
        block_size=settings.block_size,
        max_model_len=settings.max_model_len,
        threads=threads,
    )
    num_blocks = settings.kv_memory // engine.layout.block_bytes
    if num_blocks < 2:
        enough = engine.layout.sequence_bytes(engine.max_model_len)
        raise ResourceMissing(
            f"`kv_memory` of {settings.kv_memory} bytes holds less than two blocks of "
            f"{engine.layout.block_bytes} bytes; give {settings.worker} more: the model's "
            f"{engine.max_model_len} tokens need {enough}"
        )
    arena = KvArena.create(engine.layout, num_blocks)
    engine.attach(arena)
    return engine, arena


def _load_on_device(
    settings: WorkerSettings, model_dir: Path, threads: int
) -> tuple[Engine, SharedKv]:
    # Here and not above: they import transformers, and what a CPU worker need not have.
    from shared.engine.device.load import DeviceRequest, start_on
    from shared.engine.prepared import LoadRequest

    load = LoadRequest(
        model_dir,
        settings.precision,
        settings.kv_dtype,
        settings.block_size,
        settings.max_model_len,
    )
    request = DeviceRequest(
        load,
        threads,
        settings.kv_memory,
        settings.max_sequences,
        settings.max_batch_tokens,
    )
    return start_on(settings.device, request)
