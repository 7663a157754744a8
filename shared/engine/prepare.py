"""From a model directory to a checked runner: our own layers, or else transformers'."""

import logging

import torch

from shared.engine.checks import inspect_model
from shared.engine.comparison import difference, own_logits, require_equal, tolerance
from shared.engine.dtypes import KINDS
from shared.engine.fused_runner import FusedRunner
from shared.engine.hf_runner import HfRunner
from shared.engine.loading import HfModel, end_token_ids, load_model, resolve_max_model_len
from shared.engine.prepared import LoadRequest, ModelFacts, Prepared
from shared.engine.quantised import quantise_linears
from shared.engine.recipe import remember
from shared.engine.rope import pin_rope
from shared.engine.runner import ModelRunner
from shared.engine.weights import model_id
from shared.kernels.llama import LlamaStack
from shared.kv.layout import KvLayout
from shared.precision import Precision

log = logging.getLogger(__name__)


def prepare(request: LoadRequest) -> Prepared:
    """Load the model with transformers and run every check.

    Raises:
        ResourceMissing: files are missing or truncated, or memory is too small.
        UnsupportedModel: a check failed; the sentence says which.
        BadConfig: ``max_model_len`` is more than the model has positions.
    """
    model = load_model(request.model_dir, request.precision)
    limit = resolve_max_model_len(model, request.max_model_len)
    with torch.inference_mode():
        pinned = pin_rope(model, limit)
        layout = inspect_model(model, request.kv_dtype, request.block_size)
        facts = ModelFacts(
            layout=layout,
            vocab_size=_logits_width(model),
            embeddings=int(model.get_input_embeddings().weight.shape[0]),
            max_model_len=limit,
            eos_token_ids=end_token_ids(model),
        )
        runner = _runner(model, layout, request.precision)
    prepared = Prepared(facts, runner, model_id(request.model_dir))
    if not pinned:  # a pinned one is warned of at every start
        remember(request, prepared)
    return prepared


def _runner(model: HfModel, layout: KvLayout, precision: Precision) -> ModelRunner:
    name = type(model).__name__
    embedding = model.get_input_embeddings().weight
    expected, bound = own_logits(model), tolerance(precision, layout.dtype)
    kind = KINDS.get(precision)
    stack = None if kind is None else LlamaStack.of_model(model, kind)
    if stack is not None:
        fused = FusedRunner(stack, embedding)
        error = difference(fused, layout, expected, embedding.shape[0])
        if error <= bound:
            return fused
        log.warning(
            "%s: our fused layers compute something else (relative error %.3g), transformers' "
            "slower ones run instead",
            name,
            error,
        )
    quantise_linears(model, precision)
    runner = HfRunner(model, layout)
    require_equal(difference(runner, layout, expected, embedding.shape[0]), bound, name)
    return runner


def _logits_width(model: HfModel) -> int:
    head = model.get_output_embeddings()
    if head is not None:
        return int(head.weight.shape[0])
    return int(model.config.get_text_config(decoder=True).vocab_size)
