"""The doctor finds an address that other machines cannot reach before they try."""

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from shared.config import Deployment
from tools.doctor.advertise import check_advertise


@pytest.fixture
def base() -> Iterator[int]:
    """The first of two ports in a row where somebody listens on this machine."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as control:
            port = int(control.getsockname()[1])
            try:
                bulk = socket.create_server(("127.0.0.1", port + 1))
            except OSError:
                continue
            with bulk:
                yield port
            return


def found(place: Path, advertise: str | None, kv: str | None = "tcp://0.0.0.0:7400") -> str:
    """Return level and text of the one finding, nothing if there is none."""
    tree = {
        "name": "t",
        "deployment_type": "split",
        "workers": {"prefill": {}, "decode": {}},
        "endpoints": {"kv": kv, "advertise": advertise},
        "runtime_dir": str(place),
    }
    findings = check_advertise(msgspec.convert(tree, Deployment))
    return "; ".join(f"{f.level}: {f.text}" for f in findings)


def test_nothing_advertised_nothing_said(tmp_path: Path) -> None:
    assert found(tmp_path, None) == found(tmp_path, "127.0.0.1", None) == ""


@pytest.mark.parametrize(
    ("advertise", "words"),
    [
        ("no-such-host.invalid", ["fail: ", "does not resolve", "`endpoints.advertise`"]),
        ("a" * 70, ["fail: ", "does not resolve"]),
        ("0", ["fail: ", "0 is 0.0.0.0", "listening only"]),
        ("127.0.0.1", ["warn: ", "every machine takes for itself"]),
        ("192.0.2.7", ["warn: ", "no address of this machine", "NAT"]),
    ],
)
def test_what_others_cannot_reach_is_named(
    tmp_path: Path, advertise: str, words: list[str]
) -> None:
    """Guards pairs that fail one by one for an address nobody checked."""
    text = found(tmp_path, advertise)
    assert all(word in text for word in words), text


def test_a_running_worker_must_take_connections_there(tmp_path: Path, base: int) -> None:
    kv = f"tcp://127.0.0.1:{base}"
    assert found(tmp_path, "127.0.0.1", kv) == "ok: 127.0.0.1 is 127.0.0.1"
    for name in ("prefill-0", "decode-0"):
        (tmp_path / f"{name}.ready").write_text(json.dumps({"pid": os.getpid()}))
    text = found(tmp_path, "127.0.0.1", kv)
    assert text.startswith(f"fail: decode-0 runs, but tcp://127.0.0.1:{base + 2} takes no"), text
    assert "prefill-0" not in text and "is a firewall or port mapping in the way?" in text
    (tmp_path / "decode-0.ready").unlink()
    assert found(tmp_path, "127.0.0.1", kv).endswith("; prefill-0 can be reached there")
