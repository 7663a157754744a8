"""``make soak``: 10,000 readers, no two the same, that connect, test the link, fetch, and go.

Too long for every test run, which does 2,000 of the same.
"""

import sys
import time

import zmq

from tests.transport.test_bulk_connections import come_and_go
from tests.transport.test_bulk_link import CALM, Ends


def main(times: int = 10_000) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    ends = Ends(context, CALM)
    begun = time.monotonic()
    grown = come_and_go(ends, times)
    ends.close()
    context.term()
    seconds = time.monotonic() - begun
    print(
        f"{times} readers with a fetch each in {seconds:.0f} s: {grown >> 10} KiB grown, "
        "every byte right, no fd, no thread left"
    )


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
