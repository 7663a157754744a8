"""From what the deployment file names to a safetensors directory on this machine."""

import hashlib
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from shared.engine.weights import check_weights
from shared.engine.weights import model_id as model_id
from shared.errors import NotFound, ResourceMissing, UnsupportedModel
from shared.file_lock import LockTimeout, file_lock
from shared.known_models import KNOWN_MODELS, KnownModel, cache_dir, known_model_file

_LOCK_TIMEOUT: Final = 1800.0
_GGUF_MAGIC: Final = b"GGUF"


def resolve_model(path: str) -> Path:
    """Return the safetensors directory of a known name, a GGUF file or such a directory.

    A GGUF file is converted once, into ``cache_dir()/converted/<sha256>``, by one process while
    others wait; a line on stderr tells.

    Raises:
        NotFound: no such file, directory or known name.
        ResourceMissing: a known model is not fetched, or files are truncated or damaged.
        UnsupportedModel: the file is of another kind, or of an architecture not handled.
    """
    known = KNOWN_MODELS.get(path)
    if known is not None:
        return _resolve_known(known)
    location = Path(path).expanduser()
    if location.is_dir():
        check_weights(location)
        return location.absolute()
    if not location.exists():
        raise NotFound(
            f"model {path!r} is neither a file, a directory nor a known name "
            f"({', '.join(sorted(KNOWN_MODELS))}); `diptych fetch NAME` fetches a known one",
            param="model.path",
        )
    _require_gguf(location)
    return _converted(location, _sha256(location))


def _resolve_known(known: KnownModel) -> Path:
    file = known_model_file(known)
    remedy = f"run `diptych fetch {known.name}`"
    if not file.is_file():
        raise ResourceMissing(f"model {known.name} is not on this machine yet: {remedy}")
    size = file.stat().st_size
    if size != known.size:
        raise ResourceMissing(f"{file} is truncated ({size} of {known.size} bytes): {remedy}")
    if not _is_complete(_target(known.sha256)) and _sha256(file) != known.sha256:
        raise ResourceMissing(f"{file} is damaged (its sha256 is not the published one): {remedy}")
    return _converted(file, known.sha256)


def _require_gguf(file: Path) -> None:
    try:
        with file.open("rb") as stream:
            magic = stream.read(4)
    except OSError as error:
        raise ResourceMissing(f"cannot read model file {file}: {error}") from error
    if magic == _GGUF_MAGIC:
        return
    if file.suffix == ".safetensors":
        raise UnsupportedModel(f"{file} is one weight file: give the directory that holds it")
    raise UnsupportedModel(
        f"{file} is not a GGUF file: give a GGUF file or a safetensors directory"
    )


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _target(sha256: str) -> Path:
    return cache_dir() / "converted" / sha256


def _is_complete(target: Path) -> bool:
    if not target.is_dir():
        return False
    try:
        check_weights(target)
    except (ResourceMissing, UnsupportedModel):
        return False
    return True


def _converted(file: Path, sha256: str) -> Path:
    target = _target(sha256)
    if _is_complete(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.with_name(f"{sha256}.lock"), file):
            if not _is_complete(target):
                _convert_into(file, target)
    except OSError as error:
        raise ResourceMissing(f"cannot convert {file} into {target.parent}: {error}") from error
    return target


def _convert_into(file: Path, target: Path) -> None:
    # Imported here: a process that finds the model converted needs neither torch nor gguf.
    from shared.engine.gguf_import import convert_gguf

    partial = target.with_name(f"{target.name}.partial")
    for leftover in (partial, target):
        if leftover.exists():
            shutil.rmtree(leftover)
    started = time.monotonic()
    _say(f"converting {file.name} to safetensors (once; takes a while for a large model)")
    try:
        convert_gguf(file, partial)
        partial.rename(target)
    finally:
        if partial.exists():
            shutil.rmtree(partial)
    _say(f"converted {file.name} in {time.monotonic() - started:.1f} s")


@contextmanager
def _lock(path: Path, file: Path) -> Iterator[None]:
    def tell() -> None:
        _say(f"waiting for another process that converts {file.name}")

    with ExitStack() as held:
        try:
            held.enter_context(file_lock(path, _LOCK_TIMEOUT, tell))
        except LockTimeout:
            raise ResourceMissing(
                f"another process has been converting {file} for {_LOCK_TIMEOUT:.0f} s"
            ) from None
        yield


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
