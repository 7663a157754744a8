"""What loading a model is asked for, and what it gives."""

from pathlib import Path

from msgspec import Struct

from shared.engine.runner import ModelRunner
from shared.kv.layout import KvDtype, KvLayout
from shared.precision import Precision


class LoadRequest(Struct, frozen=True):
    """How a safetensors directory is to be loaded."""

    model_dir: Path
    precision: Precision
    kv_dtype: KvDtype
    block_size: int
    max_model_len: int | None


class ModelFacts(Struct, frozen=True, kw_only=True):
    """``vocab_size`` is the width of the logits, ``embeddings`` the number of known token ids."""

    layout: KvLayout
    vocab_size: int
    embeddings: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]


class Prepared(Struct, frozen=True):
    """A loaded and checked model. ``model_id`` names its files (``weights.model_id``)."""

    facts: ModelFacts
    runner: ModelRunner
    model_id: str
