"""Safetensors files seen from outside: complete or not, how big, which model they are."""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any, Final

from shared.errors import ResourceMissing, UnsupportedModel
from shared.kv.memory import available_memory

_MAX_HEADER: Final = 100 << 20
_SAMPLES: Final = 64
_SAMPLE_BYTES: Final = 16 << 10
_UNPACKED: Final = frozenset({"mxfp4"})
"""Methods whose weights transformers reads as bf16."""
OUR_GROUP: Final = 32
"""``shared.kernels.types.GROUP``, for processes without torch."""
_RUNTIME_BYTES: Final = 256 << 20
"""Memory beside the weights that the process needs while loading."""


def check_weights(model_dir: Path) -> int:
    """Check config and weight files of a model directory; return the number of parameters.

    Raises:
        ResourceMissing: a file is missing or truncated.
        UnsupportedModel: the weights are not safetensors, or quantised already, or the config is
            not readable.
    """
    _refuse_quantised(model_dir.name, read_config(model_dir))
    return sum(_check_file(path) for path in weight_files(model_dir))


def _refuse_quantised(name: str, config: dict[str, Any]) -> None:
    """Raise ``UnsupportedModel`` where the files hold another program's integers."""
    inner = config.get("text_config")
    schemes = [
        part.get("quantization_config") for part in (config, inner) if isinstance(part, dict)
    ]
    scheme = next((found for found in schemes if found), None)
    if scheme is None:
        return
    facts = scheme if isinstance(scheme, dict) else {}
    method = str(facts.get("quant_method", "an unnamed method"))
    if method in _UNPACKED:
        return
    bits, group = facts.get("bits"), facts.get("group_size")
    how = "".join((f", {bits} bits" if bits else "", f", groups of {group}" if group else ""))
    raise UnsupportedModel(
        f"{name}: its weights are quantised already ({method}{how}), in a form that is not read; "
        "use the bf16 or fp16 checkpoint that it was made of, with `precision: int8` or on a GPU "
        f"bf16, or a GGUF file of 4-bit weights in groups of {OUR_GROUP} (Q4_0, Q4_1) with "
        "`precision: int4`"
    )


def require_memory(model_dir: Path, weight_bytes: int) -> None:
    """Raise ``ResourceMissing`` where weights of this size leave no memory to load them with."""
    available = available_memory()
    if weight_bytes + _RUNTIME_BYTES > available:
        raise ResourceMissing(
            f"{model_dir.name} needs {(weight_bytes + _RUNTIME_BYTES) / 2**30:.1f} GiB of memory, "
            f"{available / 2**30:.1f} GiB are available: use a smaller model or precision"
        )


def read_config(model_dir: Path) -> dict[str, Any]:
    """Return ``config.json``. Raises ``ResourceMissing`` or ``UnsupportedModel``."""
    path = model_dir / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ResourceMissing(f"{model_dir} is no model directory: {error}") from error
    except ValueError as error:
        raise UnsupportedModel(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise UnsupportedModel(f"{path} does not hold a JSON object")
    return config


def weight_files(model_dir: Path) -> list[Path]:
    """Return the safetensors files of a model in a fixed order."""
    index = model_dir / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UnsupportedModel(f"{index} is not a weight index: {error!r}") from error
        return [model_dir / name for name in names]
    if (model_dir / "model.safetensors").is_file():
        return [model_dir / "model.safetensors"]
    if any(model_dir.glob("*.bin")):
        raise UnsupportedModel(
            f"{model_dir} holds .bin weights, which can run code when read: convert to safetensors"
        )
    raise ResourceMissing(f"{model_dir} holds no model.safetensors")


def model_id(model_dir: Path) -> str:
    """Return a name for weights + config + tokenizer, equal on every machine.

    Weights count by their headers and by samples spread over every file, so that the cost does
    not grow with the model; two trainings of one architecture differ in all of them.
    """
    digest = hashlib.blake2b(digest_size=12)
    config = read_config(model_dir)
    architecture = str(config.get("model_type", "model"))
    config.pop("transformers_version", None)
    config.pop("_name_or_path", None)
    digest.update(json.dumps(config, sort_keys=True).encode())
    for name in ("tokenizer.json", "generation_config.json"):
        path = model_dir / name
        if path.is_file():
            digest.update(hashlib.blake2b(path.read_bytes()).digest())
    for path in weight_files(model_dir):
        _sample(path, digest)
    return f"{architecture}-{digest.hexdigest()}"


def _sample(path: Path, digest: "hashlib.blake2b") -> None:
    size = path.stat().st_size
    digest.update(f"{path.name}:{size}".encode())
    with path.open("rb") as file:
        digest.update(file.read(_header_length(path, file.read(8))))
        for i in range(_SAMPLES):
            file.seek(size * i // _SAMPLES)
            digest.update(file.read(_SAMPLE_BYTES))


def _header_length(path: Path, prefix: bytes) -> int:
    length = int(struct.unpack("<Q", prefix)[0]) if len(prefix) == 8 else -1
    if not 2 <= length <= _MAX_HEADER:
        raise ResourceMissing(f"{path} is not a safetensors file or is truncated")
    return length


def _check_file(path: Path) -> int:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = _header_length(path, file.read(8))
            header = json.loads(file.read(length))
    except OSError as error:
        raise ResourceMissing(f"cannot read weights {path}: {error}") from error
    except ValueError as error:
        raise ResourceMissing(f"{path} has a damaged header: {error}") from error
    parameters, end = 0, 0
    try:
        for name, tensor in header.items():
            if name != "__metadata__":
                count = 1
                for extent in tensor["shape"]:
                    count *= extent
                parameters += count
                end = max(end, tensor["data_offsets"][1])
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ResourceMissing(f"{path} has a damaged header: {error!r}") from error
    if size != 8 + length + end:
        raise ResourceMissing(
            f"{path} is truncated or damaged: {size} bytes, {8 + length + end} expected"
        )
    return parameters
