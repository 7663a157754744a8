"""From a name or path to a model directory: what is refused, converted once, identified."""

import json
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.engine import model_files
from shared.engine.model_files import model_id, resolve_model
from shared.errors import DiptychError, NotFound, ResourceMissing, UnsupportedModel
from shared.known_models import KNOWN_MODELS, known_model_file
from tests.unit.engine_models import CONFIGS, save_model

NAME = "smollm2-135m-instruct"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "diptych"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model", CONFIGS["llama"]())


def test_a_directory_is_itself(directory: Path) -> None:
    assert resolve_model(str(directory)) == directory


def test_unknown_name_says_what_is_known() -> None:
    """A typo in the deployment file is the commonest first error."""
    with pytest.raises(NotFound) as refused:
        resolve_model("smollm3")
    assert NAME in refused.value.message
    assert "diptych fetch" in refused.value.message


def test_known_but_not_fetched_says_how_to_fetch() -> None:
    with pytest.raises(ResourceMissing, match=f"run `diptych fetch {NAME}`"):
        resolve_model(NAME)


@pytest.mark.parametrize(("change", "word"), [(-1, "truncated"), (0, "damaged")])
def test_known_file_of_wrong_content_is_refused(change: int, word: str) -> None:
    """An interrupted or tampered download must not become a model."""
    known = KNOWN_MODELS[NAME]
    file = known_model_file(known)
    file.parent.mkdir(parents=True)
    with file.open("wb") as stream:
        stream.write(b"GGUF")
        stream.truncate(known.size + change)
    with pytest.raises(ResourceMissing, match=word) as refused:
        resolve_model(NAME)
    assert "diptych fetch" in refused.value.message


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [
        ("model.gguf", b"GGUF\x03\x00\x00\x00", "truncated"),
        ("model.gguf", b"GG", "not a GGUF file"),
        ("model.safetensors", b"\x10" + bytes(30), "give the directory"),
        ("model.bin", b"PK\x03\x04", "not a GGUF file"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, name: str, content: bytes, word: str) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(DiptychError, match=word):
        resolve_model(str(file))


def test_failed_conversion_leaves_nothing_behind(tmp_path: Path, cache: Path) -> None:
    """A half-written folder would be taken for a model at the next start."""
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF\x03\x00\x00\x00" + bytes(8))
    with pytest.raises(ResourceMissing):
        resolve_model(str(file))
    assert [p.suffix for p in (cache / "converted").iterdir()] == [".lock"]


def stand_in(monkeypatch: pytest.MonkeyPatch, directory: Path) -> list[Path]:
    """Replace the conversion by a copy of ``directory``; return the list of its calls."""
    calls: list[Path] = []

    def convert(file: Path, target: Path) -> None:
        calls.append(file)
        target.mkdir()
        for part in directory.iterdir():
            (target / part.name).write_bytes(part.read_bytes())

    monkeypatch.setattr("shared.engine.gguf_import.convert_gguf", convert)
    return calls


def test_converted_once_whoever_asks(
    tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill and decode start together and must not write over each other."""
    calls = stand_in(monkeypatch, directory)
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF and more")
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(resolve_model(str(file)))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(calls) == 1
    assert len(set(found)) == 1
    assert len(found) == 3


def test_damaged_conversion_is_made_again(
    tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk or power loss may have left short files."""
    calls = stand_in(monkeypatch, directory)
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF and more")
    weights = resolve_model(str(file)) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    assert resolve_model(str(file)) == weights.parent
    assert len(calls) == 2


def test_waiting_for_a_conversion_ends(
    tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hung process must not hang every other start."""
    stand_in(monkeypatch, directory)
    monkeypatch.setattr(model_files, "_LOCK_TIMEOUT", 0.3)
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF and more")
    lock = model_files._target(model_files._sha256(file)).with_suffix(".lock")
    lock.parent.mkdir(parents=True)
    with (
        model_files._lock(lock, file),
        pytest.raises(ResourceMissing, match="another process"),
    ):
        resolve_model(str(file))
    assert resolve_model(str(file)).is_dir()


def test_pickled_weights_are_refused(directory: Path) -> None:
    """.bin weights run code when read."""
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match="can run code"):
        resolve_model(str(directory))


def test_missing_shard_is_named(directory: Path) -> None:
    weights = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(weights))
    (directory / "model.safetensors").rename(directory / "model-1.safetensors")
    with pytest.raises(ResourceMissing, match=r"model-2\.safetensors"):
        resolve_model(str(directory))


def test_model_id_tells_models_apart_and_forgets_the_place(tmp_path: Path, directory: Path) -> None:
    """Two workers may read each other's KV only with the same weights, config and tokenizer."""
    same = save_model(tmp_path / "elsewhere", CONFIGS["llama"]())
    first = model_id(directory)
    assert first == model_id(same)
    assert first.startswith("llama-")
    config = json.loads((same / "config.json").read_text())
    (same / "config.json").write_text(json.dumps({**config, "transformers_version": "0"}))
    assert model_id(same) == first
    (same / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    assert model_id(same) != first
    (same / "config.json").write_text(json.dumps(config))
    (same / "tokenizer.json").write_text("{}")
    assert model_id(same) != first
    (same / "tokenizer.json").unlink()
    tensors = load_file(same / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + torch.tensor(1.0)
    save_file(tensors, same / "model.safetensors", {"format": "pt"})
    assert model_id(same) != first
