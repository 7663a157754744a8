"""Check the model's files: there, complete, the right ones, and how big they get in memory."""

import math
from pathlib import Path

import msgspec
from msgspec import Struct

from shared.errors import NotFound, ResourceMissing
from shared.known_models import KNOWN_MODELS, known_model_file
from tools.doctor.gguf_header import summarise
from tools.fetch.fetch import verify


class ModelFiles(Struct, frozen=True, kw_only=True):
    """Where the model lies and how many parameters it has."""

    place: Path
    parameters: int
    description: str


def inspect_model(path: str) -> ModelFiles:
    """Find and check the model that ``model.path`` names.

    Raises:
        NotFound: nothing is there, with what to do.
        ResourceMissing: a file is cut off or is another one than it should be.
    """
    known = KNOWN_MODELS.get(path)
    if known is not None:
        place = known_model_file(known)
        if not place.is_file():
            raise NotFound(f"{known.name} is not fetched yet; run: diptych fetch {known.name}")
        verify(known, place)
        return _gguf(place, f"{known.name}, sha256 verified")
    place = Path(path).expanduser()
    if place.is_dir():
        return _safetensors(place)
    if place.is_file() and place.suffix == ".gguf":
        return _gguf(place, place.name)
    names = ", ".join(sorted(KNOWN_MODELS))
    raise NotFound(
        f"model `{path}` is not there: `model.path` must be a safetensors directory, "
        f"a .gguf file, or one of: {names}"
    )


def _gguf(place: Path, description: str) -> ModelFiles:
    return ModelFiles(place=place, parameters=summarise(place).parameters, description=description)


def _safetensors(place: Path) -> ModelFiles:
    for name in ("config.json", "tokenizer.json"):
        if not (place / name).is_file():
            raise NotFound(f"{place} is no model directory: it has no {name}")
    files = sorted(place.glob("*.safetensors"))
    if not files:
        raise NotFound(f"{place} is no model directory: it has no *.safetensors file")
    parameters = sum(_parameters(file) for file in files)
    return ModelFiles(place=place, parameters=parameters, description=f"{place} (safetensors)")


class _Tensor(Struct, frozen=True):
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def _parameters(path: Path) -> int:
    """Count parameters from the header: 8 bytes length, JSON, data."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length + 8 > size:
            raise ResourceMissing(f"{path} is cut off: its header does not fit the file")
        header = file.read(length)
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        tensors = [msgspec.json.decode(entry, type=_Tensor) for entry in entries.values()]
    except msgspec.MsgspecError as error:
        raise ResourceMissing(f"{path} is not a safetensors file: {error}") from error
    end = 8 + length + max((tensor.data_offsets[1] for tensor in tensors), default=0)
    if end > size:
        raise ResourceMissing(f"{path} is cut off: {size} of {end} bytes; copy it again")
    return sum(math.prod(tensor.shape) for tensor in tensors)
