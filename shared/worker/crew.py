"""The threads that compute a worker's steps: of its own cores, and of cores nobody uses."""

import logging
from collections.abc import Callable
from typing import Literal, Protocol

log = logging.getLogger(__name__)


class Board(Protocol):
    """What is asked of ``CoreBoard``."""

    def mark(self, state: Literal["idle", "busy"]) -> None: ...
    def idle_cores(self) -> tuple[int, ...]: ...


class Crew:
    """Chooses the threads of each step, and says whether there is one.

    Phases that take turns leave a core idle each time: a prompt that comes alone is read by all
    cores of the node, and decode gets those of prefill while no prompt waits. Results do not
    depend on the number of threads.

    Args:
        own: threads on this worker's cores.
        most: threads that have work, lent ones included.
        place: ``place(own, cpus)`` has the next steps run by so many threads and one on each of
            ``cpus``; False if that cannot be.
    """

    def __init__(
        self, own: int, most: int, board: Board, place: Callable[[int, tuple[int, ...]], bool]
    ) -> None:
        self._own = own
        self._room = max(0, most - own)
        self._board = board
        self._place = place
        self._lent: tuple[int, ...] = ()
        self._refused: set[int] = set()

    def busy(self) -> None:
        """A step is about to be run: this worker's cores are its own."""
        self._board.mark("busy")

    def rest(self) -> None:
        """There is nothing to run: others may take this worker's cores."""
        self._board.mark("idle")

    def gather(self) -> int:
        """Take the cores that are idle now, give the others back; return how many are lent.

        On the thread whose steps they are to help with.
        """
        idle = [cpu for cpu in self._board.idle_cores() if cpu not in self._refused]
        wanted = tuple(idle[: self._room])
        if wanted != self._lent:
            self._lent = wanted if self._place(self._own, wanted) else self._allowed(wanted)
        return len(self._lent)

    def _allowed(self, wanted: tuple[int, ...]) -> tuple[int, ...]:
        """Return those of some CPUs that this process may use; the others are not tried again."""
        refused = {cpu for cpu in wanted if not self._place(self._own, (cpu,))}
        self._refused |= refused
        if refused:
            log.warning("cores %s are not borrowed: not allowed, or no kernels", sorted(refused))
        allowed = tuple(cpu for cpu in wanted if cpu not in refused)
        return allowed if self._place(self._own, allowed) else ()
