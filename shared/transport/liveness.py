"""Who is still there: a table of last signs of life, and a watch on a process of this host."""

import asyncio
import errno
import os
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from shared.errors import ResourceMissing

Peer = TypeVar("Peer", bound=Hashable)


class PeerClock(Generic[Peer]):
    """When each peer was last heard. ``now`` is any steady clock in seconds.

    A peer not heard for more than ``timeout`` seconds is overdue. At most ``capacity`` peers
    are kept: unknown ones beyond it are not taken in.
    """

    def __init__(self, timeout: float, capacity: int = 4096) -> None:
        self._timeout = timeout
        self._capacity = capacity
        self._heard: dict[Peer, float] = {}

    def __len__(self) -> int:
        return len(self._heard)

    def heard(self, peer: Peer, now: float) -> bool:
        """Note a sign of life; False when the table is full and the peer unknown."""
        if peer not in self._heard and len(self._heard) >= self._capacity:
            return False
        self._heard[peer] = max(now, self._heard.get(peer, now))
        return True

    def age(self, peer: Peer, now: float) -> float | None:
        """Seconds since the peer was heard, None when unknown."""
        heard = self._heard.get(peer)
        return None if heard is None else max(0.0, now - heard)

    def forget(self, peer: Peer) -> None:
        """Drop the peer; unknown ones are fine."""
        self._heard.pop(peer, None)

    def overdue(self, now: float) -> list[Peer]:
        """Return the silent peers, the most silent first, and forget them."""
        late = [peer for peer, heard in self._heard.items() if now - heard > self._timeout]
        late.sort(key=self._heard.__getitem__)
        for peer in late:
            del self._heard[peer]
        return late


class PidWatch:
    """Handle of ``watch_pid``."""

    def __init__(self, cancel: Callable[[], None]) -> None:
        self._cancel: Callable[[], None] | None = cancel

    def cancel(self) -> None:
        """Stop watching; the callback will not run. Idempotent."""
        cancel, self._cancel = self._cancel, None
        if cancel is not None:
            cancel()


def watch_pid(loop: asyncio.AbstractEventLoop, pid: int, on_exit: Callable[[], None]) -> PidWatch:
    """Call ``on_exit`` once on ``loop`` when process ``pid`` of this pid namespace has ended.

    It need not be a child. A process that is gone already is reported at the next turn of the
    loop, and so is a number that cannot be a process. Later reuse of the pid does not fool the
    watch (pidfd_open(2)).

    Raises:
        ResourceMissing: no descriptor is left.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except OverflowError:
        return PidWatch(loop.call_soon(on_exit).cancel)
    except OSError as error:
        if error.errno in (errno.ESRCH, errno.EINVAL, errno.ENOENT):
            return PidWatch(loop.call_soon(on_exit).cancel)
        raise ResourceMissing(f"cannot watch process {pid}: {error.strerror}") from error

    def stop() -> None:
        loop.remove_reader(descriptor)
        os.close(descriptor)

    watch = PidWatch(stop)

    def ended() -> None:
        watch.cancel()
        on_exit()

    loop.add_reader(descriptor, ended)
    return watch
