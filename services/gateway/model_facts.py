"""What the gateway reads from a model directory's JSON files besides the tokenizer."""

from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from shared.errors import UnsupportedModel


class ModelFacts(Struct, frozen=True, kw_only=True):
    """``max_model_len`` and ``vocab_size`` in tokens; ``eos_token_ids`` end an output."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in ``path``, ``{}`` if there is no such file.

    Raises:
        UnsupportedModel: the file is not a JSON object.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError) as error:
        raise UnsupportedModel(f"cannot read {path}: {error}") from error


def read_model_facts(model_dir: Path) -> ModelFacts:
    """Read ``config.json`` and ``generation_config.json``.

    Raises:
        UnsupportedModel: a file is damaged or lacks the context length or vocabulary size.
    """
    config = read_json(model_dir / "config.json")
    text = config.get("text_config") or config
    generation = read_json(model_dir / "generation_config.json")
    eos = generation.get("eos_token_id", text.get("eos_token_id"))
    ids = eos if isinstance(eos, list) else [eos]
    return ModelFacts(
        max_model_len=_count(model_dir, text, "max_position_embeddings"),
        vocab_size=_count(model_dir, text, "vocab_size"),
        eos_token_ids=tuple(sorted({i for i in ids if isinstance(i, int)})),
    )


def _count(model_dir: Path, config: dict[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModel(f"{model_dir / 'config.json'} has no valid `{name}`: {value!r}")
    return value
