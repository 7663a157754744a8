"""Dequantise a GGUF file into a safetensors directory with config and tokenizer."""

import math
import warnings
from pathlib import Path
from typing import Final

import gguf
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from shared.errors import ResourceMissing, UnsupportedModel
from shared.kv.memory import available_memory

_PEAK_FACTOR: Final = 2.2
"""Peak memory of a conversion over the fp32 weights, measured on SmolLM2."""


def convert_gguf(file: Path, target: Path) -> None:
    """Write ``file`` as fp32 safetensors, config and tokenizer into the new folder ``target``.

    Raises:
        ResourceMissing: the file is truncated or damaged, or memory is too small.
        UnsupportedModel: transformers does not know the architecture or a tensor type.
    """
    _check_memory(file, _count_parameters(file))
    transformers.utils.logging.disable_progress_bar()
    source = {"gguf_file": file.name, "local_files_only": True, "trust_remote_code": False}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"(transformers|torch|gguf)(\.|$)")
            model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **source)
            tokenizer = AutoTokenizer.from_pretrained(file.parent, **source)
    except (ValueError, KeyError, NotImplementedError, ImportError, RuntimeError) as error:
        raise UnsupportedModel(f"{file.name} cannot be converted: {error}") from error
    if any(not p.is_floating_point() for p in model.parameters()):
        raise UnsupportedModel(f"{file.name}: transformers keeps this architecture quantised")
    model.hf_quantizer = None  # the weights are dense by now; save_pretrained refuses otherwise
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _count_parameters(file: Path) -> int:
    """Return the number of weights; reading every tensor's extent proves the file complete."""
    try:
        reader = gguf.GGUFReader(file)
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:
        raise ResourceMissing(f"{file} is truncated or damaged: {error}") from error
    if not reader.tensors:
        raise ResourceMissing(f"{file} holds no weights")
    end = max(int(t.data_offset) + int(t.n_bytes) for t in reader.tensors)
    size = file.stat().st_size
    if size < end:
        raise ResourceMissing(f"{file} is truncated: {size} bytes, {end} expected")
    return sum(math.prod(int(extent) for extent in t.shape) for t in reader.tensors)


def _check_memory(file: Path, parameters: int) -> None:
    needed = int(parameters * 4 * _PEAK_FACTOR)
    available = available_memory()
    if needed > available:
        raise ResourceMissing(
            f"converting {file.name} needs {needed / 2**30:.1f} GiB of memory, "
            f"{available / 2**30:.1f} GiB are available"
        )
