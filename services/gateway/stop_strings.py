"""Finds stop strings in text that arrives in pieces and holds back what may become one."""

from collections.abc import Sequence


class StopMatcher:
    """Ends a text before the stop string that is *completed* first.

    Of several completed at the same character the longest counts. So the result does not
    depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._tail = max((len(stop) for stop in stops), default=1) - 1
        self._held = ""
        self.matched = False

    def push(self, text: str) -> str:
        """Take more text and return what is certain to be output; nothing after a match."""
        if self.matched or not text:
            return ""
        text = self._held + text
        found = self._first(text)
        if found is not None:
            self.matched = True
            self._held = ""
            return text[:found]
        keep = self._held_back(text)
        self._held = text[len(text) - keep :] if keep else ""
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return what was held back: the text has ended."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str) -> int | None:
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(ends)[1] if ends else None

    def _held_back(self, text: str) -> int:
        for length in range(min(self._tail, len(text)), 0, -1):
            tail = text[len(text) - length :]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
