"""Delivery, bounds, loss of peers and fairness of the two links."""

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from shared.transport.link import LinkLimits
from tests.transport.harness import (
    DEADLINE,
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
BIG = bytes(256 << 10)
"""Larger than what a kernel socket buffer takes, so that few messages fill a link."""

WINDOW_OF_ONE = LinkLimits(hwm=1, outbox=5)


def test_messages_pass_both_ways(run: Run, context: Context, endpoint: str) -> None:
    async def main() -> None:
        requests, replies = Requests(), Mailbox[Message]()
        router = Router(context, endpoint, Message, requests.put_from)
        dealer = Dealer(context, router.endpoint, b"w#1", Message, replies.put)
        with opened(dealer, router):
            assert dealer.send(Note(1, b"x"))
            assert await requests.until(1) == [(b"w#1", Note(1, b"x"))]
            assert router.send(b"w#1", Note(2))
            assert await replies.until(1) == [Note(2)]
            assert router.rejected == dealer.rejected == 0

    run(main())


def test_hot_socket_leaves_turns_to_other_tasks(run: Run, context: Context, endpoint: str) -> None:
    """A flood would otherwise starve heartbeats: awaiting a ready socket never yields."""
    total, streak, longest = 20_000, 0, 0

    async def main() -> None:
        nonlocal streak, longest
        done = asyncio.Event()

        def on_message(_: bytes, message: Message) -> None:
            nonlocal streak, longest
            streak += 1
            longest = max(longest, streak)
            if message == Note(total - 1):
                done.set()

        async def heart() -> None:
            nonlocal streak
            while not done.is_set():
                streak = 0
                await asyncio.sleep(0)

        router = Router(context, endpoint, Message, on_message)
        flooder = raw_dealer(context, router.endpoint, b"flood#1")
        flood = threading.Thread(target=_flood, args=(flooder, total))
        with opened(router, flooder):
            flood.start()
            await asyncio.gather(heart(), done.wait())
            flood.join(timeout=10)

    run(main())
    assert longest <= 128


def _flood(socket: Raw, total: int) -> None:
    for number in range(total):
        socket.send(_encoded(Note(number)))


def test_unknown_and_departed_peers_are_told(run: Run, context: Context, endpoint: str) -> None:
    """Without ROUTER_MANDATORY both sends would succeed into nothing."""

    async def main() -> None:
        requests = Requests()
        router = Router(context, endpoint, Message, requests.put_from)
        dealer = Dealer(context, router.endpoint, b"w#1", Message, lambda _: None)
        with opened(dealer, router):
            assert not router.send(b"nobody#1", Note(0))
            dealer.send(Note(0))
            await requests.until(1)
            dealer.close()
            await eventually(lambda: not router.send(b"w#1", Note(0)))

    run(main())


def test_restarted_peer_gets_nothing_meant_for_its_predecessor(
    run: Run, context: Context, endpoint: str
) -> None:
    """The queue of a dead incarnation must not be inherited."""

    async def main() -> None:
        requests = Requests()
        router = Router(context, endpoint, Message, requests.put_from, limits=WINDOW_OF_ONE)
        first = raw_dealer(context, router.endpoint, b"w#1", hwm=1)
        replies = Mailbox[Message]()
        with opened(router, first):
            first.send(_encoded(Bell()))
            await requests.until(1)
            while router.send(b"w#1", Note(1, BIG)):
                pass
            first.close()
            second = Dealer(context, router.endpoint, b"w#2", Message, replies.put)
            with opened(second):
                second.send(Note(0))
                await requests.until(2)
                assert router.send(b"w#2", Note(2))
                await eventually(lambda: not router.send(b"w#1", Note(1)))
                assert router.send(b"w#2", Note(3))
                assert await replies.until(2) == [Note(2), Note(3)]

    run(main())


def test_router_outbox_is_bounded_and_recovers_in_order(
    run: Run, context: Context, endpoint: str
) -> None:
    """A stopped reader must cost bounded memory, block nobody, and lose nothing accepted."""

    async def main() -> None:
        requests, others = Requests(), Mailbox[Message]()
        router = Router(context, endpoint, Message, requests.put_from, limits=WINDOW_OF_ONE)
        slow = raw_dealer(context, router.endpoint, b"slow#1", hwm=1)
        other = Dealer(context, router.endpoint, b"other#1", Message, others.put)
        with opened(router, slow, other):
            slow.send(_encoded(Bell()))
            other.send(Note(0))
            await requests.until(2)
            accepted = 0
            while router.send(b"slow#1", Note(accepted, BIG)):
                accepted += 1
            assert 5 <= accepted < 100
            assert router.send(b"other#1", Note(7))
            await others.until(1)
            for number in range(accepted):
                frame = await asyncio.to_thread(slow.recv)
                assert frame == _encoded(Note(number, BIG))
            await eventually(lambda: not router._outboxes)
            assert router.send(b"slow#1", Note(accepted))
            assert await asyncio.to_thread(slow.recv) == _encoded(Note(accepted))

    run(main())


def test_dealer_outbox_is_bounded_and_recovers_in_order(
    run: Run, context: Context, endpoint: str
) -> None:
    async def main() -> None:
        server = raw_router(context, endpoint, hwm=1)
        address = server.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        dealer = Dealer(context, address, b"w#1", Message, lambda _: None, limits=WINDOW_OF_ONE)
        with opened(dealer, server):
            dealer.send(Note(0, BIG))
            accepted, refusals = 1, 0
            while refusals < 20:  # the I/O thread takes some more while it fills the buffers
                if dealer.send(Note(accepted, BIG)):
                    accepted, refusals = accepted + 1, 0
                else:
                    refusals += 1
                    await asyncio.sleep(0.005)
            assert 5 <= accepted < 100
            for number in range(accepted):
                frames = await asyncio.to_thread(server.recv_multipart)
                assert frames == [b"w#1", _encoded(Note(number, BIG))]

    run(main())


def test_messages_sent_before_the_router_is_there_wait_within_the_bound(
    run: Run, context: Context, directory: Path
) -> None:
    """IMMEDIATE=1 alone would refuse them, IMMEDIATE=0 would queue without our bound."""

    async def main() -> None:
        path = f"ipc://{directory}/late.sock"
        limits = LinkLimits(outbox=10)
        dealer = Dealer(context, path, b"w#1", Message, lambda _: None, limits=limits)
        with opened(dealer):
            assert [dealer.send(Note(i)) for i in range(12)] == [True] * 10 + [False] * 2
            requests = Requests()
            router = Router(context, path, Message, requests.put_from)
            with opened(router):
                assert await requests.until(10) == [(b"w#1", Note(i)) for i in range(10)]

    run(main())


def test_outbox_is_bounded_in_bytes_too(run: Run, context: Context, directory: Path) -> None:
    """Ten thousand messages of 8 MiB are no bound."""

    async def main() -> None:
        limits = LinkLimits(outbox_bytes=100)
        address = f"ipc://{directory}/none.sock"
        dealer = Dealer(context, address, b"w#1", Message, lambda _: None, limits=limits)
        with opened(dealer):
            assert dealer.send(Note(0, bytes(60)))
            assert not dealer.send(Note(1, bytes(60)))

    run(main())


def test_dealer_finds_a_restarted_router(run: Run, context: Context, directory: Path) -> None:
    async def main() -> None:
        path = f"ipc://{directory}/r.sock"
        first, second = Requests(), Requests()
        router = Router(context, path, Message, first.put_from)
        dealer = Dealer(context, path, b"w#1", Message, lambda _: None)
        with opened(dealer):
            with opened(router):
                dealer.send(Note(1))
                await first.until(1)
            router = Router(context, path, Message, second.put_from)
            with opened(router):
                number = 1

                def answered() -> bool:
                    nonlocal number
                    number += 1
                    return dealer.send(Note(number)) and bool(second.items)

                await eventually(answered)
                numbers = [m.number for _, m in second.items if isinstance(m, Note)]
                assert numbers == sorted(numbers)

    run(main())


def test_same_routing_id_again_takes_over(run: Run, context: Context, endpoint: str) -> None:
    """A reconnect may come before the router saw the old connection die: libzmq would by
    default ignore the new one, and the peer would stay unheard."""

    async def main() -> None:
        requests, replies = Requests(), Mailbox[Message]()
        router = Router(context, endpoint, Message, requests.put_from)
        first = raw_dealer(context, router.endpoint, b"w#1")
        with opened(router, first):
            first.send(_encoded(Note(1)))
            await requests.until(1)
            second = Dealer(context, router.endpoint, b"w#1", Message, replies.put)
            with opened(second):
                second.send(Note(2))
                assert await requests.until(2) == [(b"w#1", Note(1)), (b"w#1", Note(2))]
                assert router.send(b"w#1", Note(3))
                assert await replies.until(1) == [Note(3)]

    run(main())


def test_farewell_survives_close(run: Run, context: Context, endpoint: str) -> None:
    """With LINGER=0 a bye behind other messages would be dropped when the socket closes."""

    async def main() -> None:
        requests = Requests()
        router = Router(context, endpoint, Message, requests.put_from)
        dealer = Dealer(context, router.endpoint, b"w#1", Message, lambda _: None)
        with opened(router):
            dealer.send(Note(0))
            await requests.until(1)
            for number in range(1, 40):
                assert dealer.send(Note(number, BIG))
            dealer.close()
            assert (await requests.until(40))[-1] == (b"w#1", Note(39, BIG))

    run(main())


def test_closed_links_refuse_and_close_again(run: Run, context: Context, directory: Path) -> None:
    async def main() -> None:
        router = Router(context, f"ipc://{directory}/c.sock", Message, lambda *_: None)
        dealer = Dealer(context, router.endpoint, b"w#1", Message, lambda _: None)
        for link in (router, dealer):
            link.close()
            link.close()
        assert not router.send(b"w#1", Note(0))
        assert not dealer.send(Note(0))
        assert os.listdir(directory) == []

    run(main())


def test_raising_handler_is_reported_and_later_messages_flow(
    run: Run, context: Context, endpoint: str
) -> None:
    """An exception in one handler must neither vanish nor stop the reader."""

    async def main() -> None:
        reported: list[BaseException] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: reported.append(context["exception"]))
        got = Mailbox[Message]()

        def on_message(peer: bytes, message: Message) -> None:
            if message == Note(1):
                raise KeyError("surprise")
            got.put(message)

        router = Router(context, endpoint, Message, on_message)
        dealer = Dealer(context, router.endpoint, b"w#1", Message, lambda _: None)
        with opened(dealer, router):
            for number in range(4):
                dealer.send(Note(number))
            assert await got.until(3) == [Note(0), Note(2), Note(3)]
        assert [str(error) for error in reported] == ["'surprise'"]

    run(main())


def test_handler_may_close_its_link(run: Run, context: Context, endpoint: str) -> None:
    """A refusal closes the link from inside its own reader."""

    async def main() -> None:
        closed = asyncio.Event()

        def on_message(_: Message) -> None:
            dealer.close()
            closed.set()

        requests = Requests()
        router = Router(context, endpoint, Message, requests.put_from)
        dealer = Dealer(context, router.endpoint, b"w#1", Message, on_message)
        with opened(router, dealer):
            dealer.send(Note(0))
            await requests.until(1)
            for number in range(3):
                router.send(b"w#1", Note(number))
            await asyncio.wait_for(closed.wait(), DEADLINE)

    run(main())


@pytest.mark.timeout(110)
def test_a_thousand_connections_leave_nothing(run: Run, context: Context, endpoint: str) -> None:
    """Descriptors or per-peer state that stay would end a long-lived router."""

    async def main() -> None:
        requests = Requests()
        router = Router(context, endpoint, Message, requests.put_from)

        async def cycle(number: int) -> None:
            replies = Mailbox[Message]()
            identity = b"w#%d" % number
            dealer = Dealer(context, router.endpoint, identity, Message, replies.put)
            with opened(dealer):
                dealer.send(Note(number))
                await requests.until(number + 1)
                assert router.send(identity, Note(number))
                await replies.until(1)

        with opened(router):
            for number in range(20):
                await cycle(number)
            before = len(os.listdir("/proc/self/fd"))
            for number in range(20, 1000):
                await cycle(number)
            await eventually(lambda: len(os.listdir("/proc/self/fd")) <= before + 5)
            assert not router._outboxes

    run(main(), timeout=100.0)


def _encoded(message: Message) -> bytes:
    return msgspec.msgpack.encode(message)
