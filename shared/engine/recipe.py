"""What checking a model found out, kept so that the next start needs no transformers.

Importing transformers' modelling code and checking a model take seconds, and find the same every
time for the same files and the same code. A recipe holds the findings for a model that runs in
our fused layers: its facts, the shape of its layers, and the first logits of a test run, which
the layers built from the recipe must reproduce before they are used.
"""

import hashlib
import logging
import os
from importlib.metadata import version
from pathlib import Path
from typing import Final

import msgspec
import torch
from msgspec import Struct

from shared.engine.dtypes import KINDS, LOADED_AS
from shared.engine.fused_runner import FusedRunner
from shared.engine.llama_files import FileWeights, LlamaNames, llama_names
from shared.engine.prepared import LoadRequest, ModelFacts, Prepared
from shared.engine.probe import paged_logits
from shared.engine.weights import check_weights, model_id, require_memory
from shared.kernels.build import SOURCE_DIR
from shared.kernels.llama import LlamaStack
from shared.kernels.llama_parts import StackShape
from shared.kernels.load import tier
from shared.known_models import cache_dir

log = logging.getLogger(__name__)

_MAX_KEPT: Final = 64
_PROBED: Final = 16
"""Logits compared per token of the test run."""

_TOLERANCE: Final = 1e-4
"""Of the largest probed logit; the same code on the same weights differs by nothing at all."""


class Recipe(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``frequencies`` and ``factor`` are the rotary embedding's."""

    facts: ModelFacts
    shape: StackShape
    frequencies: tuple[float, ...]
    factor: float
    names: LlamaNames
    probe: tuple[tuple[float, ...], ...]


def recall(request: LoadRequest) -> Prepared | None:
    """Return the model as an earlier start found it, or None where it must be checked anew.

    Raises:
        ResourceMissing: files are missing or truncated, or memory is too small.
        UnsupportedModel: the files are no safetensors.
    """
    parameters = check_weights(request.model_dir)
    model = model_id(request.model_dir)
    path = _path(request, model)
    try:
        recipe = decode(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, msgspec.DecodeError) as error:
        log.warning("%s is not usable, the model is checked anew: %s", path, error)
        return None
    layout = recipe.facts.layout
    if (layout.dtype, layout.block_size) != (request.kv_dtype, request.block_size):
        log.warning("%s is of other KV than is asked for; the model is checked anew", path)
        return None
    require_memory(request.model_dir, parameters * LOADED_AS[request.precision].itemsize)
    try:
        runner = _build(request, recipe)
        found = torch.tensor(_probe(runner, recipe.facts))
    except (ArithmeticError, LookupError, RuntimeError, ValueError) as error:
        # a recipe written while the model's files were being replaced
        log.warning("%s does not fit the model, which is checked anew: %r", path, error)
        return None
    expected = torch.tensor(recipe.probe)
    if found.shape == expected.shape and _close(found, expected):
        return Prepared(recipe.facts, runner, model)
    log.warning("%s does not reproduce what it promises; the model is checked anew", path)
    return None


def remember(request: LoadRequest, prepared: Prepared) -> None:
    """Keep what was found out about a model in our fused layers; others are not kept."""
    runner = prepared.runner
    names = llama_names(request.model_dir, len(prepared.facts.layout.layers))
    if not isinstance(runner, FusedRunner) or names is None:
        return
    recipe = Recipe(
        facts=prepared.facts,
        shape=runner.stack.shape,
        frequencies=tuple(runner.stack.frequencies.tolist()),
        factor=runner.stack.factor,
        names=names,
        probe=_probe(runner, prepared.facts),
    )
    path = _path(request, prepared.model_id)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_bytes(encode(recipe))
            partial.rename(path)
        finally:
            partial.unlink(missing_ok=True)
        kept = sorted(path.parent.glob("*.json"), key=lambda p: p.stat().st_mtime)
        for old in kept[:-_MAX_KEPT]:
            old.unlink(missing_ok=True)
    except OSError as error:
        log.warning("the next start will check the model again: %s", error)


def encode(recipe: Recipe) -> bytes:
    """Return a recipe file: a checksum, as not every fact shows in the test run, and JSON."""
    body = msgspec.json.encode(recipe)
    return _checksum(body) + b"\n" + body


def decode(content: bytes) -> Recipe:
    """Raises ``ValueError`` or ``msgspec.DecodeError`` where it is none, or not as written."""
    checksum, _, body = content.partition(b"\n")
    if checksum != _checksum(body):
        raise ValueError("its checksum is wrong")
    return msgspec.json.decode(body, type=Recipe)


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16).hexdigest().encode()


def _build(request: LoadRequest, recipe: Recipe) -> FusedRunner:
    kind = KINDS[request.precision]
    stack = LlamaStack(recipe.shape, torch.tensor(recipe.frequencies), recipe.factor, kind)
    weights = FileWeights(request.model_dir, recipe.names, LOADED_AS[request.precision])
    embedding = weights.embedding()
    layers = enumerate(recipe.facts.layout.layers)
    stack.fill((weights.layer(i, kv.window) for i, kv in layers), embedding, weights.head())
    return FusedRunner(stack, embedding)


def _probe(runner: FusedRunner, facts: ModelFacts) -> tuple[tuple[float, ...], ...]:
    rows = torch.cat(paged_logits(runner, facts.layout, facts.embeddings))
    return tuple(tuple(row) for row in rows[:, :_PROBED].tolist())


def _close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).abs().max() <= _TOLERANCE * expected.abs().max())


def _path(request: LoadRequest, model: str) -> Path:
    """Name the recipe after everything that its content depends on."""
    digest = hashlib.blake2b(digest_size=16)
    asked = (request.precision, request.kv_dtype, request.block_size, request.max_model_len)
    described = (*asked, tier(), torch.__version__, version("transformers"))
    digest.update(repr((model, *described)).encode())
    here = Path(__file__).parent
    code = [*here.glob("*.py"), *(here.parent / "kernels").glob("*.py")]
    for file in sorted([*code, *SOURCE_DIR.glob("*.h"), *SOURCE_DIR.glob("*.cpp")]):
        digest.update(f"{file.name}\0".encode() + file.read_bytes())
    return cache_dir() / "recipes" / f"{digest.hexdigest()}.json"
