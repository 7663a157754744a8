"""Download one file over HTTP into a ``.part`` file that a later run continues."""

import hashlib
import ssl
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path

import httpx

from shared.errors import ResourceMissing
from tools.fetch.pip import PipNetwork, Source

Progress = Callable[[int, int | None], None]
"""Called with (bytes there, bytes in all or None when unknown)."""

_CHUNK = 1 << 18
_TIMEOUT = httpx.Timeout(30.0)
_ATTEMPTS = 4


class NeedsPip(Exception):
    """Only pip can read this source: an unusual URL, or one that asks for credentials."""


def download(source: Source, part: Path, progress: Progress, network: PipNetwork) -> None:
    """Make ``part`` the complete, verified file.

    Interrupted transfers continue where they stopped, within this call and in later ones.

    Raises:
        ResourceMissing: no connection, an HTTP error, or a wrong hash.
        NeedsPip: see there.
    """
    scheme = urllib.parse.urlsplit(source.url).scheme
    if scheme == "file":
        _copy_local(source.url, part, progress)
    elif scheme in ("http", "https"):
        _download_http(source.url, part, progress, network)
    else:
        raise NeedsPip
    if source.sha256 is not None and file_sha256(part) != source.sha256:
        part.unlink()
        raise ResourceMissing(
            f"the download of {source.url} has a wrong sha256 and was discarded; try again"
        )


def file_sha256(path: Path) -> str:
    """Return the hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _copy_local(url: str, part: Path, progress: Progress) -> None:
    origin = Path(urllib.request.url2pathname(urllib.parse.urlsplit(url).path))
    try:
        size = origin.stat().st_size
        with origin.open("rb") as reader, part.open("wb") as writer:
            while chunk := reader.read(_CHUNK):
                writer.write(chunk)
                progress(writer.tell(), size)
    except OSError as error:
        raise ResourceMissing(f"cannot copy {origin}: {error}") from error


def _download_http(url: str, part: Path, progress: Progress, network: PipNetwork) -> None:
    with httpx.Client(
        timeout=_TIMEOUT,
        follow_redirects=True,
        proxy=network.proxy,
        verify=_tls(network),
    ) as client:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                _continue(client, url, part, progress)
            except httpx.HTTPError as error:
                if attempt == _ATTEMPTS:
                    raise ResourceMissing(
                        f"the download of {url} broke off: {_name(error)}; "
                        "run the command again to continue it"
                    ) from error
            else:
                return


def _continue(client: httpx.Client, url: str, part: Path, progress: Progress) -> None:
    have = part.stat().st_size if part.exists() else 0
    headers = {"Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    with client.stream("GET", url, headers=headers) as answer:
        if answer.status_code in (401, 403, 407):
            raise NeedsPip
        if answer.status_code == 416:
            if answer.headers.get("Content-Range") == f"bytes */{have}":
                return
            part.unlink()
            raise httpx.ReadError("the partial file does not fit the server's file")
        if answer.status_code not in (200, 206):
            raise ResourceMissing(f"GET {url} answered {answer.status_code}")
        if answer.status_code == 200:
            have = 0
        total = _total(answer, have)
        with part.open("r+b" if have else "wb") as file:
            file.seek(have)
            # Without a chunk size: with one, httpx holds bytes back and loses them on a break.
            for chunk in answer.iter_raw():
                file.write(chunk)
                have += len(chunk)
                progress(have, total)
        if total is not None and have < total:
            raise httpx.ReadError(f"{have} of {total} bytes")


def _total(answer: httpx.Response, have: int) -> int | None:
    if answer.status_code == 206:
        span, _, size = answer.headers.get("Content-Range", "").partition("/")
        if not span.startswith(f"bytes {have}-"):
            raise httpx.ReadError(f"the server continued at {span!r} instead of byte {have}")
        return int(size) if size.isdigit() else None
    length = answer.headers.get("Content-Length", "")
    return int(length) if length.isdigit() else None


def _tls(network: PipNetwork) -> ssl.SSLContext:
    context = httpx.create_ssl_context()
    context.load_default_certs()
    try:
        if network.cert is not None and Path(network.cert).is_dir():
            context.load_verify_locations(capath=network.cert)
        elif network.cert is not None:
            context.load_verify_locations(cafile=network.cert)
        if network.client_cert is not None:
            context.load_cert_chain(network.client_cert)
    except (OSError, ssl.SSLError) as error:
        raise ResourceMissing(f"pip's certificate setting cannot be used: {error}") from error
    return context


def _name(error: httpx.HTTPError) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
