"""From a model directory to an engine whose steps run on a device."""

import importlib
import logging
from pathlib import Path
from typing import cast

import torch
from msgspec import Struct

from shared.device.device import Device, SharedKv
from shared.device.names import capability_problem, device_problem
from shared.device.open import open_device
from shared.engine.checks import inspect_model
from shared.engine.comparison import difference, own_logits, require_equal, tolerance
from shared.engine.device.fp8_linear import round_linears
from shared.engine.device.kernels import DeviceKernels
from shared.engine.device.runner import DeviceRunner
from shared.engine.dtypes import LOADED_AS
from shared.engine.engine import Engine
from shared.engine.loading import HfModel, end_token_ids, load_model, resolve_max_model_len
from shared.engine.prepared import LoadRequest, ModelFacts, Prepared
from shared.engine.rope import pin_rope
from shared.engine.weights import check_weights, model_id
from shared.errors import BadConfig, ResourceMissing, UnsupportedModel

log = logging.getLogger(__name__)


class DeviceRequest(Struct, frozen=True):
    """``kv_bytes`` is the size of the pool; a step has at most ``most`` sequences and ``rows``
    tokens.
    """

    load: LoadRequest
    threads: int
    kv_bytes: int
    most: int
    rows: int


def start_on(name: str, request: DeviceRequest) -> tuple[Engine, SharedKv]:
    """Open the device, load and check the model, take KV memory and record decode graphs.

    Returns the engine, ready to step, and what other processes see of its KV. The KV itself is the
    process's until it ends.

    Raises:
        BadConfig, ResourceMissing, UnsupportedModel: with one sentence what is wrong.
    """
    device = open_device(name)
    return start(device, request, *choose_kernels(device.place))


def start(
    device: Device, request: DeviceRequest, kernels: DeviceKernels, attention: str
) -> tuple[Engine, SharedKv]:
    """Do as ``start_on``, on an opened device."""
    device.set_threads(request.threads)
    prepared, runner = prepare_on(device, request.load, kernels, attention)
    engine = Engine(prepared, request.load.model_dir, request.threads)
    layout = engine.layout
    num_blocks = request.kv_bytes // layout.block_bytes - 1  # and a scratch block
    if num_blocks < 2:
        enough = layout.sequence_bytes(engine.max_model_len) + layout.block_bytes
        raise ResourceMissing(
            f"`kv_memory` of {request.kv_bytes} bytes holds less than three blocks of "
            f"{layout.block_bytes} bytes; give {device.place} more: the model's "
            f"{engine.max_model_len} tokens need {enough}"
        )
    memory, shared = device.kv_memory(layout, num_blocks)
    engine.attach(memory)
    longest = min(engine.max_model_len, num_blocks * layout.block_size)
    try:
        runner.rehearse(request.rows, longest)
        sizes = runner.record(request.most, longest)
    except BaseException:
        engine.detach()
        shared.close()
        memory.close()
        raise
    facts = device.facts()
    log.info(
        "%s (%s): %d KV blocks, decode graphs of %s, %d MiB free",
        device.place,
        facts.name,
        num_blocks,
        ", ".join(map(str, sizes)) or "no size",
        facts.memory_free >> 20,
    )
    return engine, shared


def choose_kernels(place: torch.device) -> tuple[DeviceKernels, str]:
    """Return the attention to use and its name: FlashInfer's for prompts where it is installed."""
    # Here and not above: triton is only there where a device is.
    from shared.kernels.gpu import attention
    from shared.kernels.gpu.flashinfer_kernels import FlashInferKernels

    try:
        flashinfer = importlib.import_module("flashinfer")
    except ImportError:
        return cast(DeviceKernels, attention), "Triton attention"
    return FlashInferKernels(flashinfer, attention, place), "FlashInfer and Triton attention"


def prepare_on(
    device: Device, request: LoadRequest, kernels: DeviceKernels, name: str
) -> tuple[Prepared, DeviceRunner]:
    """Load the model onto the device and run every check there.

    Raises:
        ResourceMissing: files are missing or truncated, or memory is too small.
        UnsupportedModel: a check failed; the sentence says which.
        BadConfig: ``max_model_len`` is more than the model has positions, or the device does not
            compute in the formats asked for.
    """
    _require_formats(device, request)
    _require_memory(device, request)
    with torch.device(device.place):
        model = load_model(request.model_dir, request.precision)
        limit = resolve_max_model_len(model, request.max_model_len)
        with torch.inference_mode():
            pin_rope(model, limit)
            layout = inspect_model(model, request.kv_dtype, request.block_size)
        expected = [logits.cpu() for logits in own_logits(model)]
    if request.precision == "fp8":
        name = f"fp8 weights, {name}"
        round_weights(model, device, kernels)
    embeddings = int(model.get_input_embeddings().weight.shape[0])
    runner = DeviceRunner(model, layout, device, kernels, name)
    try:
        error = difference(runner, layout, expected, embeddings)
    except AttributeError as reason:
        raise UnsupportedModel(
            f"{type(model).__name__} does not run with {request.precision} layers in the place of "
            f"its own ({reason}); use bf16"
        ) from reason
    require_equal(error, tolerance(request.precision, layout.dtype), type(model).__name__)
    facts = ModelFacts(
        layout=layout,
        vocab_size=int(expected[0].shape[1]),
        embeddings=embeddings,
        max_model_len=limit,
        eos_token_ids=end_token_ids(model),
    )
    return Prepared(facts, runner, model_id(request.model_dir)), runner


def _require_formats(device: Device, request: LoadRequest) -> None:
    facts = device.facts()
    problem = device_problem("cuda", request.precision, request.kv_dtype)
    if problem is None and facts.kind == "cuda":
        problem = capability_problem(facts.capability, request.precision, request.kv_dtype)
    if problem is not None:
        raise BadConfig(problem)


def round_weights(model: HfModel, device: Device, kernels: DeviceKernels) -> None:
    """Make linear layers fp8, and let no piece of the bf16 ones' memory stay taken.

    torch gives back whole pieces only, and the loader may have put all weights into one: so what
    is left moves out and in again.
    """
    with torch.inference_mode():
        kept = round_linears(model, kernels.quantise_rows)
    if kept:
        log.warning(
            "%d linear layers stay in bf16, since fp8 takes multiples of 16 inputs and outputs: %s",
            len(kept),
            ", ".join(kept[:8]) + (" …" if len(kept) > 8 else ""),
        )
    model.to("cpu")
    device.trim()
    model.to(device.place)


def _require_memory(device: Device, request: LoadRequest) -> None:
    weights = check_weights(Path(request.model_dir)) * LOADED_AS[request.precision].itemsize
    facts = device.facts()
    if weights > facts.memory_free:
        raise ResourceMissing(
            f"the weights need {weights >> 20} MiB and {device.place} ({facts.name}) has "
            f"{facts.memory_free >> 20} of {facts.memory_total >> 20} MiB free"
        )
