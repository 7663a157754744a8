"""The model in the form that each peer reads."""

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from shared.engine.weights import model_id, read_config, weight_files
from shared.errors import BadConfig, ResourceMissing
from shared.known_models import KNOWN_MODELS, cache_dir, known_model_file
from tools.bench.peers.peer import Peer

_TOP = 127


def model_for(peer: Peer, model: str, model_dir: Path) -> Path:
    """Return what ``peer`` reads. ``model`` is the user's word for it, ``model_dir`` our form.

    Raises:
        BadConfig: llama.cpp is to read what is not a GGUF file.
        ResourceMissing: the int8 form cannot be written.
    """
    if peer.weights == "gguf":
        known = KNOWN_MODELS.get(model)
        file = Path(model).expanduser() if known is None else known_model_file(known)
        if not file.is_file():
            raise BadConfig(f"{peer.name} reads GGUF files, and {model} is none")
        return file
    return w8a8(model_dir) if peer.weights == "w8a8" else model_dir


def w8a8(model_dir: Path) -> Path:
    """Return the int8 form of a model: weights per output channel, activations per token.

    A compressed-tensors directory, made once in the cache.
    """
    target = cache_dir() / "peers" / "models" / f"{model_id(model_dir)}-w8a8"
    if target.is_dir():
        return target
    partial = target.with_name(f"{target.name}.{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        for file in model_dir.iterdir():
            if file.is_file() and not file.name.startswith("model.safetensors"):
                shutil.copy(file, partial)
        save_file(_quantised(model_dir), partial / "model.safetensors", {"format": "pt"})
        config = {**read_config(model_dir), "dtype": "bfloat16", "quantization_config": _SCHEME}
        (partial / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        partial.rename(target)
    except OSError as error:
        raise ResourceMissing(f"cannot write {target}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def quantise_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 [out, in] and fp32 scales [out, 1]; a row's largest weight becomes +-127."""
    weight = weight.float()
    scale = weight.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / _TOP
    return (weight / scale).round().to(torch.int8), scale


def _quantised(model_dir: Path) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for file in weight_files(model_dir):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                tensor = tensors.get_tensor(name)
                if name.endswith("_proj.weight"):
                    out[name], out[f"{name}_scale"] = quantise_rows(tensor)
                else:
                    out[name] = tensor.to(torch.bfloat16)
    return out


_SCHEME = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "channel",
                "dynamic": False,
            },
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}
