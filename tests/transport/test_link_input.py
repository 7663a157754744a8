"""Whatever arrives is decoded or counted; nothing raises and nothing stops the next message."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.transport.link import LinkLimits
from tests.transport.harness import (
    Bell,
    Context,
    Dealer,
    Mailbox,
    Message,
    Note,
    Raw,
    Requests,
    Router,
    eventually,
    opened,
    raw_dealer,
    raw_router,
)

Run = Callable[..., Any]
SMALL = LinkLimits(max_frame=1000)
encode = msgspec.msgpack.encode


@st.composite
def almost_messages(draw: st.DrawFn) -> bytes:
    """An encoded message with a few bytes cut, replaced or added: it passes most checks."""
    good = bytearray(encode(Note(draw(st.integers(0, 2**40)), draw(st.binary(max_size=20)))))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(good)))
        good[at : at + draw(st.integers(0, 2))] = draw(st.binary(max_size=3))
    return bytes(good)


deep = st.integers(1, 3000).map(lambda n: b"\x91" * n)
huge_lengths = st.sampled_from([b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff"])
frame = st.binary(max_size=40) | almost_messages() | deep | huge_lengths
garbage = st.lists(frame, min_size=1, max_size=3)


def _is_message(frames: list[bytes]) -> bool:
    if len(frames) != 1:
        return False
    try:
        msgspec.msgpack.decode(frames[0], type=Message)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return True


@contextmanager
def _loop(context: Context) -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        unhandled: list[Any] = []
        runner.get_loop().set_exception_handler(lambda _, found: unhandled.append(found))
        yield runner
    assert unhandled == []


def test_router_counts_garbage_and_hears_the_next_message(
    context: Context, directory: Path
) -> None:
    with _loop(context) as runner:
        requests = Requests()

        async def build() -> tuple[Router, Raw]:
            link = Router(context, f"ipc://{directory}/f.sock", Message, requests.put_from)
            return link, raw_dealer(context, link.endpoint, b"fuzz#1")

        router, peer = runner.run(build())

        @settings(max_examples=300, deadline=None)
        @given(st.lists(garbage, min_size=1, max_size=5))
        def inner(batch: list[list[bytes]]) -> None:
            async def round_trip() -> None:
                rejected, heard = router.rejected, len(requests.items)
                for frames in batch:
                    peer.send_multipart(frames)
                peer.send(encode(Bell()))
                good = sum(map(_is_message, batch))
                await requests.until(heard + good + 1)
                assert requests.items[-1] == (b"fuzz#1", Bell())
                assert router.rejected - rejected == len(batch) - good

            runner.run(round_trip())

        with opened(router, peer):
            inner()


def test_dealer_counts_garbage_and_hears_the_next_message(
    context: Context, directory: Path
) -> None:
    with _loop(context) as runner:
        replies = Mailbox[Message]()

        async def build() -> tuple[Dealer, Raw]:
            path = f"ipc://{directory}/f.sock"
            server = raw_router(context, path)
            link = Dealer(context, path, b"w#1", Message, replies.put)
            link.send(Bell())
            await asyncio.to_thread(server.recv_multipart)
            return link, server

        dealer, server = runner.run(build())

        @settings(max_examples=300, deadline=None)
        @given(st.lists(garbage, min_size=1, max_size=5))
        def inner(batch: list[list[bytes]]) -> None:
            async def round_trip() -> None:
                rejected, heard = dealer.rejected, len(replies.items)
                for frames in batch:
                    server.send_multipart([b"w#1", *frames])
                server.send_multipart([b"w#1", encode(Bell())])
                good = sum(map(_is_message, batch))
                await replies.until(heard + good + 1)
                assert replies.items[-1] == Bell()
                assert dealer.rejected - rejected == len(batch) - good

            runner.run(round_trip())

        with opened(dealer, server):
            inner()


@pytest.mark.parametrize("size", [1001, 1999])
def test_router_counts_a_frame_over_the_limit(
    run: Run, context: Context, endpoint: str, size: int
) -> None:
    async def main() -> None:
        requests = Requests()
        router = Router(context, endpoint, Message, requests.put_from, limits=SMALL)
        peer = raw_dealer(context, router.endpoint, b"big#1")
        with opened(router, peer):
            peer.send(bytes(size))
            peer.send(encode(Bell()))
            assert await requests.until(1) == [(b"big#1", Bell())]
            assert router.rejected == 1

    run(main())


def test_far_too_large_frame_is_never_taken_in_and_the_peer_may_come_back(
    run: Run, context: Context, endpoint: str
) -> None:
    """libzmq itself must stop reading it, or one peer's frame takes all memory."""

    async def main() -> None:
        requests = Requests()
        router = Router(context, endpoint, Message, requests.put_from, limits=SMALL)
        peer = raw_dealer(context, router.endpoint, b"big#1")
        with opened(router, peer):
            peer.send(bytes(1 << 20))

            def heard_again() -> bool:
                peer.send(encode(Bell()), zmq.NOBLOCK)
                return bool(requests.items)

            await eventually(heard_again)
            assert router.rejected == 0

    run(main())


def test_dealer_outlives_a_frame_over_the_limit(run: Run, context: Context, endpoint: str) -> None:
    """With MAXMSGSIZE libzmq would end the dealer's session without ever reconnecting."""

    async def main() -> None:
        replies = Mailbox[Message]()
        server = raw_router(context, endpoint)
        address = server.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        dealer = Dealer(context, address, b"w#1", Message, replies.put, limits=SMALL)
        with opened(dealer, server):
            dealer.send(Bell())
            await asyncio.to_thread(server.recv_multipart)
            server.send_multipart([b"w#1", bytes(1 << 20)])
            server.send_multipart([b"w#1", encode(Bell())])
            assert await replies.until(1) == [Bell()]
            assert dealer.rejected == 1

    run(main())


def test_links_do_not_send_what_the_other_end_would_cut_off(
    run: Run, context: Context, endpoint: str
) -> None:
    async def main() -> None:
        requests = Requests()
        router = Router(context, endpoint, Message, requests.put_from, limits=SMALL)
        dealer = Dealer(context, router.endpoint, b"w#1", Message, lambda _: None, limits=SMALL)
        with opened(dealer, router):
            assert not dealer.send(Note(0, bytes(1001)))
            assert dealer.send(Note(1, bytes(900)))
            await requests.until(1)
            assert not router.send(b"w#1", Note(0, bytes(1001)))

    run(main())
