"""Readers that come and go, over real sockets."""

import os
import threading
import time

import psutil
import pytest

from shared.transport.bulk.fetches import Failed
from shared.transport.bulk.reader import Fetched
from tests.transport.harness import Context
from tests.transport.test_bulk_link import CALM, DEADLINE, SOURCE, Ends


def come_and_go(ends: Ends, times: int) -> int:
    """Connect, test, fetch, and disconnect so often; return by how many bytes the process grew.

    Each time is another reader, as far as the source can tell. Both ends live in this process.
    Memory is compared from a tenth of the way on, when every cache is warm; pyzmq starts a thread
    with the first message sent without a copy.
    """
    endpoint = ends.serve()
    assert ends.open(endpoint).error is None
    ends.reader.drop(SOURCE)
    fds, threads, warm = len(os.listdir("/proc/self/fd")), threading.active_count(), 0
    process = psutil.Process()
    for number in range(times):
        opened = ends.open(endpoint, identity=b"decode-%d#%d" % (number, number + 5))
        assert opened.error is None, opened.error
        block = range(number % 8, number % 8 + 1)
        outcome = ends.fetch(block)
        assert isinstance(outcome, Fetched) and ends.equal(block)
        ends.reader.drop(SOURCE)
        if number == times // 10:
            warm = process.memory_info().rss
    deadline = time.monotonic() + DEADLINE
    while len(os.listdir("/proc/self/fd")) - fds >= 16:  # libzmq lets go a moment later
        assert time.monotonic() < deadline, "descriptors stay"
        time.sleep(0.01)
    assert threading.active_count() == threads
    grown = process.memory_info().rss - warm
    assert grown < 8 << 20, f"{grown} bytes more after {times} connections"
    return int(grown)


@pytest.mark.timeout(90)
def test_thousands_of_connections_leave_nothing_behind(context: Context) -> None:
    """Guards growth with every reader that ever came (30)."""
    ends = Ends(context, CALM)
    come_and_go(ends, 2_000)
    assert isinstance(ends.fetch(), Failed)
    ends.close()
