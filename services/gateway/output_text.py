"""The visible text of one output: detokenised, end tokens hidden, cut before a stop string."""

from collections.abc import Container, Sequence

from services.gateway.detokenize import Detokenizer
from services.gateway.stop_strings import StopMatcher


class OutputText:
    """Fed one token at a time; its state depends on the tokens only, so it can be replayed.

    ``num_tokens`` counts tokens up to the one that completed a stop string, ``length`` the
    characters returned so far, ``offset`` those that the tokens so far stand for (stop string
    and held-back text included). Before ``min_tokens`` stop strings are ordinary text.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        stops: Sequence[str] = (),
        stop_tokens: Container[int] = (),
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops) if stops else None
        self._stop_tokens = stop_tokens
        self._min_tokens = min_tokens
        self.num_tokens = 0
        self.length = 0
        self.offset = 0

    @property
    def stopped(self) -> bool:
        """A stop string was found: no further token belongs to the output."""
        return self._matcher is not None and self._matcher.matched

    def push(self, token: int) -> str:
        """Take the next token and return the visible text that became certain."""
        self.num_tokens += 1
        if token in self._stop_tokens:
            return ""
        text = self._detokenizer.push(token)
        self.offset += len(text)
        if self._matcher is not None and self.num_tokens >= self._min_tokens:
            text = self._matcher.push(text)
        self.length += len(text)
        return text

    def finish(self) -> str:
        """Return the rest of the visible text; call once, at the end."""
        if self.stopped:
            return ""
        text = self._detokenizer.flush()
        if self._matcher is not None:
            text = self._matcher.push(text) + self._matcher.flush()
        self.length += len(text)
        return text
