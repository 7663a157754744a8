"""What a request must be like to be taken in at all."""

from shared.errors import ErrorPayload
from shared.messages.request import Request
from shared.worker.ledger import BlockLedger
from shared.worker.limits import WorkerLimits
from shared.worker.pool_size import never_fits


def refusal(request: Request, limits: WorkerLimits, ledger: BlockLedger) -> ErrorPayload | None:
    """Return why this worker can never run ``request``, or None."""
    if not request.prompt_ids:
        return _invalid("the prompt is empty", "prompt")
    tokens = len(request.prompt_ids) + len(request.output_ids)
    blocks = ledger.pool.num_blocks
    memory = blocks * ledger.pool.block_size
    if len(request.prompt_ids) >= limits.max_model_len and limits.max_model_len < memory:
        return _invalid(
            f"the prompt has {len(request.prompt_ids)} tokens; with at least one more for the "
            f"answer it exceeds the model length of {limits.max_model_len}",
            "prompt",
        )
    if ledger.needed(tokens + 1) > blocks:
        return _invalid(never_fits(tokens + 1, ledger.pool), "prompt")
    if request.sampling.max_tokens < 1:
        return _invalid("max_tokens must be at least 1", "max_tokens")
    ids = (*request.prompt_ids, *request.output_ids)
    if min(ids) < 0 or max(ids) >= limits.vocab_size:
        return _invalid(f"token ids must be in 0..{limits.vocab_size - 1}", "prompt")
    return None


def _invalid(message: str, param: str) -> ErrorPayload:
    return ErrorPayload(code="invalid_request", message=message, param=param)
