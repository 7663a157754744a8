"""Readers that take nothing: the sender's memory stays small, and the others do not notice."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import psutil
import pytest

from shared.kv.arena import KvArena
from shared.messages.bulk import Fetch
from shared.transport.bulk.server import HostServer
from tests.transport.churning_source import fill
from tests.transport.harness import Context, Raw, raw_dealer
from tests.transport.stoppable_reader import (
    BLOCKS,
    CHUNK,
    CHUNKS,
    LAYOUT,
    LIMITS,
    PER_JOB,
    Reading,
    stoppable_reader,
)

FETCHES = 8
DEADLINE = 10.0
SEND_LIMIT = 1024
"""Messages that libzmq queues for one reader, as the server's socket is set."""
GROWTH = 24 << 20
"""Bytes; what a reader that stands still may cost is far less, what the other one gets far more."""


@contextmanager
def served(context: Context) -> Iterator[tuple[HostServer, int]]:
    arena = KvArena.create(LAYOUT, BLOCKS)
    for block in range(BLOCKS):
        fill(arena, block, block)
    server = HostServer(context, "tcp://127.0.0.1:0", arena, worker="prefill-0")
    try:
        yield server, arena.descriptor().arena_id
    finally:
        server.close()
        arena.close()


def unaffected(server: HostServer, arena: int) -> int:
    """Fetch beside whoever is slow; return how many chunks went to others meanwhile."""
    reading = Reading(server.endpoint, arena, "decode-0#5")
    try:
        sent = server.stats.chunks
        reading.fetch()
        counted(server, sent + CHUNKS)
        before, size = server.stats.chunks, psutil.Process().memory_info().rss
        for _ in range(FETCHES):
            assert reading.fetch().again == 0
        grown = psutil.Process().memory_info().rss - size
        assert grown < GROWTH, f"{grown} bytes more"
        return counted(server, before + FETCHES * CHUNKS) - before - FETCHES * CHUNKS
    finally:
        reading.close()


def counted(server: HostServer, chunks: int) -> int:
    """Return how many chunks were sent once these were: each is counted after it is sent."""
    deadline = time.monotonic() + DEADLINE
    while server.stats.chunks < chunks and time.monotonic() < deadline:
        time.sleep(0.01)
    return server.stats.chunks


def test_a_reader_that_stands_still_holds_its_window_and_nobody_up(context: Context) -> None:
    """Guards a sender that fills its memory for a process that is stopped (26), and a reader
    that fails once it goes on."""
    with served(context) as (server, arena), stoppable_reader(server.endpoint, arena) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert unaffected(server, arena) <= LIMITS.slots
        process.send_signal(signal.SIGCONT)
        before = int(process.stdout.readline())
        assert int(process.stdout.readline()) == before + 1, "it goes on, and every byte is right"
        process.stdin.close()
        while process.stdout.readline():
            pass
        assert process.wait(30) == 0


def asked(context: Context, server: HostServer, arena: int, credit: int, jobs: int) -> Raw:
    """Return a reader that asks for all chunks of so many jobs, and never reads."""
    socket = raw_dealer(context, server.endpoint, b"decode-9#1", hwm=1)
    for job in range(jobs):
        fetch = Fetch(
            job=job,
            attempt=1,
            arena=arena,
            first_layer=0,
            end_layer=len(LAYOUT.layers),
            blocks=tuple(range(0, 2 * PER_JOB, 2)),
            generations=(0,) * PER_JOB,
            chunk_bytes=CHUNK,
            need=((0, CHUNKS),),
            credit=credit,
        )
        socket.send(msgspec.msgpack.encode(fetch))
    return socket


def test_without_new_credit_nothing_more_is_sent(context: Context) -> None:
    """Guards chunks that pile up for a reader whose slots are all taken (26)."""
    with served(context) as (server, arena):
        slow = asked(context, server, arena, credit=3, jobs=1)
        try:
            assert unaffected(server, arena) <= 3
            assert unaffected(server, arena) == 0
        finally:
            slow.close(linger=0)


@pytest.mark.timeout(60)
def test_a_reader_that_grants_more_than_it_reads_is_bounded_by_its_socket(
    context: Context,
) -> None:
    """Guards the sender's memory against credit that promises no room at all."""
    jobs = 100
    with served(context) as (server, arena):
        slow = asked(context, server, arena, credit=1 << 30, jobs=jobs)
        try:
            unaffected(server, arena)
            assert unaffected(server, arena) < 16, "what its socket does not take is dropped"
            assert server.stats.chunks < 2 * SEND_LIMIT < jobs * CHUNKS
        finally:
            slow.close(linger=0)
