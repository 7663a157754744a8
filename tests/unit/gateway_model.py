"""The real tokenizer for gateway tests, loaded once."""

from functools import cache

import pytest

from services.gateway.tokenizer import Tokenizer
from shared.engine.model_files import resolve_model
from shared.known_models import KNOWN_MODELS, known_model_file

NAME = "smollm2-135m-instruct"


@cache
def load() -> Tokenizer:
    return Tokenizer(resolve_model(NAME))


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    if not known_model_file(KNOWN_MODELS[NAME]).exists():
        pytest.skip("the model file is absent: run `diptych fetch`")
    return load()
