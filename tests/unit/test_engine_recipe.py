"""A start from a recipe gives what a checked start gives, or there is no such start."""

import hashlib
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.engine import recipe, weights
from shared.engine.prepare import prepare
from shared.engine.prepared import LoadRequest, Prepared
from shared.engine.probe import paged_logits
from shared.precision import Precision, kv_dtype_for
from tests.unit.engine_models import BLOCK, CONFIGS, load_engine, save_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(recipe, "cache_dir", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "recipes"


def request(directory: Path, precision: Precision = "fp32") -> LoadRequest:
    return LoadRequest(directory, precision, kv_dtype_for(precision, None), BLOCK, None)


def logits(prepared: Prepared) -> torch.Tensor:
    facts = prepared.facts
    return torch.cat(paged_logits(prepared.runner, facts.layout, facts.embeddings))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_a_recalled_model_is_the_checked_one(
    tmp_path: Path, family: str, precision: Precision
) -> None:
    """A weight under another name, a lost window or rounding done twice would change a logit."""
    asked = request(save_model(tmp_path / "model", CONFIGS[family]()), precision)
    assert recipe.recall(asked) is None
    checked = prepare(asked)
    recalled = recipe.recall(asked)
    assert recalled is not None
    assert recalled.facts == checked.facts
    assert torch.equal(logits(recalled), logits(checked))


@pytest.mark.parametrize("family", ["gemma2", "mixtral"])
def test_models_of_other_layers_are_checked_at_every_start(
    tmp_path: Path, cache: Path, family: str
) -> None:
    """Their layers are transformers': a recipe could not build them."""
    asked = request(save_model(tmp_path / "model", CONFIGS[family]()))
    prepare(asked)
    assert recipe.recall(asked) is None
    assert not list(cache.glob("*"))


@pytest.mark.parametrize("content", [b"", b"{}", b'{"facts": 1}', b"\xff" * 40])
def test_a_damaged_recipe_means_checking_anew(tmp_path: Path, cache: Path, content: bytes) -> None:
    """A file cut short by a full disk must not keep a service from starting."""
    asked = request(save_model(tmp_path / "model", CONFIGS["llama"]()))
    prepare(asked)
    (file,) = cache.glob("*.json")
    file.write_bytes(content)
    assert recipe.recall(asked) is None


def test_layers_that_do_not_reproduce_the_test_run_are_not_used(
    tmp_path: Path, cache: Path
) -> None:
    """Weights changed where the sampled identity does not look would be served unchecked."""
    asked = request(save_model(tmp_path / "model", CONFIGS["llama"]()))
    prepare(asked)
    (file,) = cache.glob("*.json")
    kept = recipe.decode(file.read_bytes())
    other = msgspec.structs.replace(kept, factor=kept.factor * 1.5)
    file.write_bytes(recipe.encode(other))
    assert recipe.recall(asked) is None


@pytest.mark.parametrize(
    "fact", ["vocab_size", "max_model_len", "eos_token_ids", "embeddings", "prefix"]
)
def test_a_recipe_with_one_changed_byte_means_checking_anew(
    tmp_path: Path, cache: Path, fact: str
) -> None:
    """Facts that the test run does not touch, as the length limit, would be believed; others
    would end every start by an exception until somebody deletes the file."""
    asked = request(save_model(tmp_path / "model", CONFIGS["llama"]()))
    prepare(asked)
    (file,) = cache.glob("*.json")
    content = bytearray(file.read_bytes())
    at = content.index(f'"{fact}":'.encode()) + len(fact) + 4
    content[at] ^= 1  # a digit stays a digit, a letter a letter
    file.write_bytes(content)
    assert recipe.recall(asked) is None


def test_a_recipe_of_other_kv_means_checking_anew(tmp_path: Path, cache: Path) -> None:
    """Guards a pool of another dtype than the deployment file's: each reproduces itself."""
    ours = request(save_model(tmp_path / "model", CONFIGS["llama"]()), "int4")
    prepare(ours)
    (file,) = cache.glob("*.json")
    prepare(msgspec.structs.replace(ours, kv_dtype="int8"))
    (other,) = set(cache.glob("*.json")) - {file}
    file.write_bytes(other.read_bytes())
    assert recipe.recall(ours) is None


@pytest.mark.parametrize("change", ["layers", "names", "shape", "frequencies"])
def test_a_recipe_of_other_files_means_checking_anew(
    tmp_path: Path, cache: Path, change: str
) -> None:
    """Written while a model was being replaced, it would end every start by an exception."""
    asked = request(save_model(tmp_path / "model", CONFIGS["llama"]()))
    prepare(asked)
    (file,) = cache.glob("*.json")
    kept = recipe.decode(file.read_bytes())
    replace, layout = msgspec.structs.replace, kept.facts.layout
    other = {
        "layers": lambda: {
            "facts": replace(kept.facts, layout=replace(layout, layers=layout.layers * 2))
        },
        "names": lambda: {"names": replace(kept.names, prefix="decoder.")},
        "shape": lambda: {"shape": replace(kept.shape, hidden=kept.shape.hidden * 2)},
        "frequencies": lambda: {"frequencies": kept.frequencies[:1]},
    }[change]()
    file.write_bytes(recipe.encode(replace(kept, **other)))
    assert recipe.recall(asked) is None


def test_a_recipe_that_cannot_be_kept_leaves_nothing_behind(tmp_path: Path, cache: Path) -> None:
    """A full disk would get one more partial file with every start."""
    asked = request(save_model(tmp_path / "model", CONFIGS["llama"]()))
    prepare(asked)
    (file,) = cache.glob("*.json")
    file.unlink()
    file.mkdir()  # what is renamed to a folder's name fails, as on a full disk
    assert recipe.recall(asked) is None
    prepare(asked)
    assert list(cache.iterdir()) == [file]


def test_other_weights_have_a_recipe_of_their_own(tmp_path: Path) -> None:
    """One model's facts under another's weights."""
    directory = save_model(tmp_path / "model", CONFIGS["llama"]())
    asked = request(directory)
    prepare(asked)
    weights = directory / "model.safetensors"
    tensors = {name: tensor * 1.01 for name, tensor in load_file(weights).items()}
    save_file(tensors, weights, {"format": "pt"})
    assert recipe.recall(asked) is None


def test_recipes_do_not_pile_up(tmp_path: Path, cache: Path) -> None:
    """One file for every model, precision and version ever started."""
    asked = request(save_model(tmp_path / "model", CONFIGS["llama"]()))
    cache.mkdir(parents=True)
    for number in range(80):
        (cache / f"{number}.json").touch()
    prepare(asked)
    assert len(list(cache.glob("*.json"))) == 64
    assert recipe.recall(asked) is not None


def test_a_start_from_a_recipe_looks_once_which_model_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked at twice, files replaced in between are served under the name of the others."""
    directory = save_model(tmp_path / "model", CONFIGS["llama"]())
    prepare(request(directory))
    looked, sample = [], weights._sample

    def counted(path: Path, digest: "hashlib.blake2b") -> None:
        looked.append(path.name)
        sample(path, digest)

    monkeypatch.setattr(weights, "_sample", counted)
    engine = load_engine(directory)
    assert looked == ["model.safetensors"]
    assert engine.model_id == weights.model_id(directory)


def test_a_worker_imports_no_modelling_code() -> None:
    """Three seconds of every start, and 200 MB, would be back unnoticed."""
    code = "import sys, shared.worker.service; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
