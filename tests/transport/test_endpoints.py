"""Addresses that are taken, stale, too long or not addresses at all."""

import asyncio
import fcntl
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shared.errors import BadConfig, DiptychError, ResourceMissing
from shared.transport import ipc_file
from shared.transport.ipc_file import listen, remove_own
from tests.transport.harness import Bell, Context, Dealer, Message, Requests, Router, opened

Run = Callable[..., Any]

_OWNER = """
import asyncio, sys, zmq
from shared.transport.link import RouterLink

async def main():
    link = RouterLink(zmq.Context(), sys.argv[1], int, lambda peer, message: None)
    print("bound", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.fixture
def ignore() -> Callable[..., None]:
    return lambda *_: None


def _start_owner(endpoint: str) -> "subprocess.Popen[str]":
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER, endpoint], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == "bound\n"
    return owner


def _kill(owner: "subprocess.Popen[str]") -> None:
    owner.kill()
    owner.communicate(timeout=10)


def test_file_of_a_killed_owner_is_replaced(run: Run, context: Context, directory: Path) -> None:
    """After kill -9 the file stays; a restart must not need a cleaning hand."""
    path = directory / "x.sock"
    _kill(_start_owner(f"ipc://{path}"))
    assert path.exists()

    async def main() -> None:
        requests = Requests()
        router = Router(context, f"ipc://{path}", Message, requests.put_from)
        dealer = Dealer(context, f"ipc://{path}", b"w#1", Message, lambda _: None)
        with opened(dealer, router):
            dealer.send(Bell())
            await requests.until(1)

    run(main())
    assert not path.exists()


@pytest.mark.parametrize("stopped", [False, True])
def test_file_of_a_live_owner_is_refused_and_left_alone(
    run: Run, context: Context, directory: Path, ignore: Callable[..., None], stopped: bool
) -> None:
    """libzmq itself would silently take the path over, and the first owner would hear nobody."""
    path = directory / "x.sock"
    owner = _start_owner(f"ipc://{path}")
    try:
        if stopped:
            owner.send_signal(signal.SIGSTOP)
        inode = path.stat().st_ino

        async def main() -> None:
            with pytest.raises(ResourceMissing, match="in use by a running process"):
                Router(context, f"ipc://{path}", Message, ignore)

        run(main())
        assert path.stat().st_ino == inode
    finally:
        _kill(owner)


def test_only_one_of_many_simultaneous_starts_gets_a_stale_file(directory: Path) -> None:
    """Two that both find the file stale must not both bind: the loser would be unreachable."""
    path = directory / "x.sock"
    descriptor, _ = listen(path)
    os.close(descriptor)
    barrier, outcomes = threading.Barrier(8), list[int | ResourceMissing]()

    def start() -> None:
        barrier.wait(10)
        try:
            outcomes.append(listen(path)[0])
        except ResourceMissing as error:
            outcomes.append(error)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    won = [outcome for outcome in outcomes if isinstance(outcome, int)]
    for descriptor in won:
        os.close(descriptor)
    assert len(outcomes) == 8
    assert len(won) == 1


def test_a_start_that_holds_the_lock_too_long_ends_the_wait(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ipc_file, "_LOCK_TIMEOUT", 0.05)
    holder = os.open(directory, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    with pytest.raises(ResourceMissing, match="locked by another start"):
        listen(directory / "x.sock")
    os.close(holder)


def test_an_old_owner_does_not_remove_its_successors_file(directory: Path) -> None:
    """libzmq unlinks by name when its listener ends, whoever owns the name by then."""
    path = directory / "x.sock"
    first, first_inode = listen(path)
    os.close(first)
    keep_inode_busy = directory / "old"
    os.link(path, keep_inode_busy)
    second, _ = listen(path)
    remove_own(path, first_inode)
    assert path.exists()
    os.close(second)


def test_socket_files_and_new_directories_are_ours_alone(
    run: Run, context: Context, directory: Path, ignore: Callable[..., None]
) -> None:
    async def main() -> None:
        router = Router(context, f"ipc://{directory}/a/b/x.sock", Message, ignore)
        with opened(router):
            for name, mode in (("a", 0o700), ("a/b", 0o700), ("a/b/x.sock", 0o600)):
                assert stat.S_IMODE((directory / name).stat().st_mode) == mode

    run(main())


def test_directory_that_others_may_change_is_refused(
    run: Run, context: Context, directory: Path, ignore: Callable[..., None]
) -> None:
    """Whoever can rename the socket can put another one in its place."""
    shared = directory / "shared"
    shared.mkdir()
    shared.chmod(0o777)

    async def main() -> None:
        with pytest.raises(ResourceMissing, match="can be changed by other users"):
            Router(context, f"ipc://{shared}/x.sock", Message, ignore)

    run(main())


def test_a_file_that_is_no_socket_is_kept(
    run: Run, context: Context, directory: Path, ignore: Callable[..., None]
) -> None:
    path = directory / "notes.txt"
    path.write_text("precious")

    async def main() -> None:
        with pytest.raises(ResourceMissing, match="not a socket"):
            Router(context, f"ipc://{path}", Message, ignore)

    run(main())
    assert path.read_text() == "precious"


def test_too_long_path_is_refused_on_both_sides(
    run: Run, context: Context, directory: Path, ignore: Callable[..., None]
) -> None:
    """The kernel keeps 107 bytes; bytes count, not characters."""
    stem = f"ipc://{directory}/"
    fits = stem + "x" * (107 - len(stem) + 6)
    longer, wide = fits + "x", stem + "é" * 50

    async def main() -> None:
        opened_router = Router(context, fits, Message, ignore)
        with opened(opened_router, Dealer(context, fits, b"w#1", Message, ignore)):
            for endpoint in (longer, wide):
                with pytest.raises(ResourceMissing, match=r"107 are possible.*runtime_dir"):
                    Router(context, endpoint, Message, ignore)
                with pytest.raises(ResourceMissing, match="107 are possible"):
                    Dealer(context, endpoint, b"w#1", Message, ignore)

    run(main())


def test_tcp_port_in_use_is_named(run: Run, context: Context, ignore: Callable[..., None]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        endpoint = f"tcp://127.0.0.1:{other.getsockname()[1]}"

        async def main() -> None:
            with pytest.raises(ResourceMissing, match=f"{endpoint} is in use"):
                Router(context, endpoint, Message, ignore)

        run(main())


@pytest.mark.parametrize(
    ("endpoint", "error"),
    [
        ("tcp://203.0.113.9:0", ResourceMissing),
        ("tcp://127.0.0.1", BadConfig),
        ("tcp://127.0.0.1:http", BadConfig),
        ("ipc://relative.sock", BadConfig),
        ("ipc://@abstract", BadConfig),
        ("carrier-pigeon://x", BadConfig),
        ("", BadConfig),
    ],
)
def test_unusable_endpoints_are_named(
    run: Run,
    context: Context,
    ignore: Callable[..., None],
    endpoint: str,
    error: type[DiptychError],
) -> None:
    async def main() -> None:
        with pytest.raises(error) as caught:
            Router(context, endpoint, Message, ignore)
        assert endpoint in caught.value.message

    run(main())


@pytest.mark.parametrize("identity", [b"", b"\0auto", b"x" * 256])
def test_routing_ids_that_libzmq_cannot_carry_are_refused(
    run: Run, context: Context, directory: Path, ignore: Callable[..., None], identity: bytes
) -> None:
    async def main() -> None:
        with pytest.raises(BadConfig, match="routing id"):
            Dealer(context, f"ipc://{directory}/x.sock", identity, Message, ignore)

    run(main())


def test_ipv6_loopback_works(run: Run, context: Context) -> None:
    async def main() -> None:
        requests = Requests()
        router = Router(context, "tcp://[::1]:0", Message, requests.put_from)
        dealer = Dealer(context, router.endpoint, b"w#1", Message, lambda _: None)
        with opened(dealer, router):
            dealer.send(Bell())
            await asyncio.wait_for(requests.until(1), 10)

    if not Path("/proc/net/if_inet6").exists():
        pytest.skip("this kernel has no IPv6")
    run(main())
