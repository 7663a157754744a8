"""Many prompts at a bounded number in flight: what to start when, and a progress bar."""

import math
import shutil
import time
from typing import TextIO

from diptych.errors import DiptychError, InvalidRequest, Overloaded
from diptych.results import Completion

Outcome = Completion | DiptychError


class BatchPlan:
    """Order of work of one batch; knows no thread and no clock.

    A prompt that is answered *overloaded* is tried again after the time the answer names, or
    one second, as long as its own time is not up. Any other error is raised by ``end`` unless
    ``keep_errors``.
    """

    def __init__(
        self, count: int, max_in_flight: int, timeout: float, *, keep_errors: bool
    ) -> None:
        if max_in_flight < 1:
            raise InvalidRequest("max_in_flight must be at least 1", param="max_in_flight")
        self.outcomes: list[Outcome | None] = [None] * count
        self.finished = 0
        self.in_flight = 0
        self._max_in_flight = max_in_flight
        self._timeout = timeout
        self._keep_errors = keep_errors
        self._next = 0
        self._deadlines: dict[int, float] = {}
        self._retries: list[tuple[float, int]] = []

    def start(self, now: float) -> tuple[int, float] | None:
        """Return the prompt to start now and its time limit in seconds, or None."""
        if self.in_flight >= self._max_in_flight:
            return None
        due = min(self._retries, default=None)
        if due is not None and due[0] <= now:
            self._retries.remove(due)
            index = due[1]
        elif self._next < len(self.outcomes):
            index, self._next = self._next, self._next + 1
            self._deadlines[index] = now + self._timeout
        else:
            return None
        self.in_flight += 1
        return index, self._deadlines[index] - now

    def end(self, index: int, outcome: Outcome, now: float) -> None:
        """Note how an attempt ended. Raises the error that ends the batch."""
        self.in_flight -= 1
        if isinstance(outcome, Overloaded):
            retry_at = now + max(outcome.retry_after or 1.0, 0.01)
            if retry_at < self._deadlines[index]:
                self._retries.append((retry_at, index))
                return
        if isinstance(outcome, DiptychError) and not self._keep_errors:
            raise outcome
        self.finished += 1
        self.outcomes[index] = outcome

    def wake_in(self, now: float) -> float:
        """Return the seconds until the next retry is due; infinite without one."""
        if self.in_flight >= self._max_in_flight:
            return math.inf
        return max(min(self._retries, default=(math.inf, 0))[0] - now, 0.0)

    @property
    def done(self) -> bool:
        return self.finished == len(self.outcomes)

    def results(self) -> list[Outcome]:
        """Return the outcomes so far in the order of the prompts."""
        return [outcome for outcome in self.outcomes if outcome is not None]


class ProgressBar:
    """One line on a terminal; silent elsewhere."""

    def __init__(self, total: int, stream: TextIO, wanted: bool) -> None:
        self._total = total
        self._stream = stream
        self._shown = wanted and total > 0 and stream.isatty()
        self._began = time.monotonic()
        self._drawn = -math.inf

    def draw(self, plan: BatchPlan, *, last: bool = False) -> None:
        """Show where the batch is, at most ten times a second."""
        now = time.monotonic()
        if not self._shown or (now - self._drawn < 0.1 and not last):
            return
        self._drawn = now
        done = [o for o in plan.outcomes if isinstance(o, Completion)]
        tokens = sum(o.usage.completion_tokens for o in done)
        spent = max(now - self._began, 1e-3)
        failed = plan.finished - len(done)
        tail = f" {plan.finished}/{self._total}  {tokens} tok  {tokens / spent:.0f} tok/s"
        tail += f"  {failed} failed" if failed else ""
        width = max(shutil.get_terminal_size().columns - len(tail) - 4, 8)
        filled = width * plan.finished // self._total
        self._stream.write(f"\r[{'#' * filled}{'.' * (width - filled)}]{tail}")
        self._stream.write("\n" if last else "")
        self._stream.flush()
