"""Keys on disk, which endpoints need them, and who is let in."""

import os
import stat
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import zmq
from zmq.utils import z85

from shared.config import SecuritySection
from shared.errors import BadConfig, ResourceMissing
from shared.transport.admission import Admission, _gates
from shared.transport.security import (
    CurveClient,
    CurveServer,
    Side,
    generate_keys,
    security_for,
)
from tests.transport.harness import (
    Bell,
    Context,
    Dealer,
    Mailbox,
    Message,
    Note,
    Requests,
    Router,
    eventually,
    opened,
)

Run = Callable[..., Any]
OPEN = "tcp://0.0.0.0:5000"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return generate_keys(tmp_path / "keys")


@pytest.fixture
def section(keys: Path) -> SecuritySection:
    return SecuritySection(keys=str(keys))


def _stranger(client: CurveClient) -> CurveClient:
    public, secret = zmq.curve_keypair()
    return CurveClient(public=public, secret=secret, server=client.server)


def test_keys_are_private_and_never_overwritten(keys: Path) -> None:
    files = [path for path in keys.rglob("*") if path.is_file()]
    assert len(files) == 4
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in (keys, keys / "clients")} == {0o700}
    before = {path: path.read_bytes() for path in files}
    with pytest.raises(ResourceMissing, match="never overwritten"):
        generate_keys(keys)
    assert {path: path.read_bytes() for path in files} == before


def test_keys_are_not_half_written_beside_an_old_one(tmp_path: Path) -> None:
    (tmp_path / "server.public").write_text("old")
    with pytest.raises(ResourceMissing, match="never overwritten"):
        generate_keys(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["server.public"]


def test_unwritable_directory_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ResourceMissing, match="cannot write keys"):
        generate_keys(tmp_path / "file")


@pytest.mark.parametrize("side", ["bind", "connect"])
@pytest.mark.parametrize(
    "endpoint",
    [OPEN, "tcp://*:5000", "tcp://192.168.1.5:5000", "tcp://gpu-7:5000", "tcp://[::]:5000"],
)
def test_reachable_tcp_without_keys_is_refused(endpoint: str, side: Side) -> None:
    """An open port without keys lets anybody on the network run and read requests."""
    with pytest.raises(BadConfig, match=r"diptych keys DIR.*security\.keys"):
        security_for(endpoint, SecuritySection(), side)


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://127.0.0.1:5000",
        "tcp://127.8.8.8:5000",
        "tcp://localhost:5000",
        "tcp://[::1]:5000",
        "ipc:///run/x.sock",
    ],
)
def test_local_endpoints_need_no_keys(endpoint: str) -> None:
    assert security_for(endpoint, SecuritySection(), "bind") is None
    assert security_for(endpoint, SecuritySection(), "connect") is None


def test_both_sides_agree_whatever_address_each_uses(section: SecuritySection) -> None:
    """A server on 0.0.0.0 with keys and a client on 127.0.0.1 without never meet."""
    for endpoint in (OPEN, "tcp://127.0.0.1:5000"):
        assert isinstance(security_for(endpoint, section, "bind"), CurveServer)
        assert isinstance(security_for(endpoint, section, "connect"), CurveClient)
    assert security_for("ipc:///run/x.sock", section, "bind") is None


def test_always_means_ipc_too(keys: Path) -> None:
    section = SecuritySection(curve="always", keys=str(keys))
    assert isinstance(security_for("ipc:///run/x.sock", section, "bind"), CurveServer)
    with pytest.raises(BadConfig, match="diptych keys DIR"):
        security_for("ipc:///run/x.sock", SecuritySection(curve="always"), "bind")


@pytest.mark.parametrize("endpoint", ["udp://1.2.3.4:5", "tcp://", "5000", "tcp://a:1;b:2"])
def test_other_transports_are_refused(endpoint: str) -> None:
    with pytest.raises(BadConfig):
        security_for(endpoint, SecuritySection(), "connect")


def test_damaged_and_absent_keys_are_named(keys: Path, section: SecuritySection) -> None:
    (keys / "server.secret").write_text("not a key")
    with pytest.raises(BadConfig, match=r"server\.secret"):
        security_for(OPEN, section, "bind")
    (keys / "server.public").unlink()
    with pytest.raises(BadConfig, match=r"server\.public"):
        security_for(OPEN, section, "connect")
    (keys / "clients" / "fleet.public").unlink()
    (keys / "server.secret").write_bytes(zmq.curve_keypair()[1])
    with pytest.raises(BadConfig, match="nobody could connect"):
        security_for(OPEN, section, "bind")


def test_a_second_client_is_allowed_by_its_public_key(keys: Path, section: SecuritySection) -> None:
    public, _ = zmq.curve_keypair()
    (keys / "clients" / "alice.public").write_bytes(public)
    server = security_for(OPEN, section, "bind")
    assert server is not None
    assert public in server.allowed
    assert len(server.allowed) == 2


def test_right_key_works_and_others_are_refused(
    run: Run, context: Context, section: SecuritySection
) -> None:
    """A stranger's key is counted; a client without a key or with the wrong server key is not
    heard either; the right one works next to them."""

    async def main() -> None:
        server, client = security_for(OPEN, section, "bind"), security_for(OPEN, section, "connect")
        assert client is not None
        requests, replies = Requests(), Mailbox[Message]()
        router = Router(context, "tcp://127.0.0.1:0", Message, requests.put_from, security=server)
        wrong_server = CurveClient(
            public=client.public, secret=client.secret, server=zmq.curve_keypair()[0]
        )
        outsiders = [
            Dealer(context, router.endpoint, b"out#%d" % i, Message, replies.put, security=security)
            for i, security in enumerate((_stranger(client), wrong_server, None))
        ]
        insider = Dealer(context, router.endpoint, b"in#1", Message, replies.put, security=client)
        with opened(router, insider, *outsiders):
            for dealer in outsiders:
                assert dealer.send(Note(0))
            await eventually(lambda: router.denied >= 1)
            insider.send(Note(1))
            assert await requests.until(1) == [(b"in#1", Note(1))]
            assert router.send(b"in#1", Bell())
            assert await replies.until(1) == [Bell()]
            assert not any(router.send(b"out#%d" % i, Bell()) for i in range(3))

    run(main())


def test_a_refused_key_is_named_once_and_strangers_cannot_fill_the_log(
    run: Run, context: Context, section: SecuritySection, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards a wrong key that shows as nothing but a worker that never comes (67)."""
    server = security_for(OPEN, section, "bind")
    assert server is not None

    async def main() -> None:
        with closing(Admission(context, server)) as admission:
            public = zmq.curve_keypair()[0]
            assert not any(admission.judge(z85.decode(public)) for _ in range(3))
            (line,) = caplog.messages
            assert public.decode() in line and "`security.keys`" in line
            for _ in range(200):
                admission.judge(os.urandom(32))
            assert len(caplog.messages) == 64 and admission.denied == 203

    run(main())


def test_links_of_one_context_judge_by_their_own_keys(
    run: Run, context: Context, section: SecuritySection
) -> None:
    """libzmq has one handler per context: it must not let the clients of one link into another."""

    async def main() -> None:
        server, client = security_for(OPEN, section, "bind"), security_for(OPEN, section, "connect")
        assert server is not None
        assert client is not None
        alice = _stranger(client)
        other = CurveServer(secret=server.secret, allowed=frozenset([alice.public]))
        first, second = Requests(), Requests()
        address = "tcp://127.0.0.1:0"
        fleet = Router(context, address, Message, first.put_from, security=server)
        people = Router(context, address, Message, second.put_from, security=other)
        wrong = Dealer(context, fleet.endpoint, b"a#1", Message, lambda _: None, security=alice)
        right = Dealer(context, people.endpoint, b"a#2", Message, lambda _: None, security=alice)
        with opened(people, wrong, right):
            with opened(fleet):
                wrong.send(Bell())
                right.send(Bell())
                await second.until(1)
                await eventually(lambda: fleet.denied >= 1)
                assert people.denied == 0
            late = Dealer(context, people.endpoint, b"a#3", Message, lambda _: None, security=alice)
            with opened(late):
                late.send(Bell())
                await second.until(2)
        assert context not in _gates

    run(main())


def test_failed_bind_takes_its_handler_along(
    run: Run, context: Context, section: SecuritySection
) -> None:
    async def main() -> None:
        server = security_for(OPEN, section, "bind")
        with pytest.raises(ResourceMissing):
            Router(context, "tcp://203.0.113.9:0", Message, lambda *_: None, security=server)
        assert context not in _gates

    run(main())
