"""Grammar-constrained output: the door to xgrammar, opened with the first grammar."""

from pathlib import Path
from typing import TYPE_CHECKING

from shared.errors import DiptychError
from shared.messages.request import Grammar

if TYPE_CHECKING:
    from shared.engine.sampling.xgrammar_compiler import Matcher, XgrammarCompiler


class GrammarMismatch(DiptychError):
    """Tokens already produced do not fit the request's grammar."""


class GrammarCompiler:
    """Compiles grammars for one model.

    ``vocab_size`` is the width of the logits; ``threads`` compile one grammar.
    """

    def __init__(
        self, model_dir: Path, vocab_size: int, end_tokens: tuple[int, ...], threads: int
    ) -> None:
        self._model_dir = model_dir
        self._vocab_size = vocab_size
        self._end_tokens = end_tokens
        self._threads = threads
        self._compiler: XgrammarCompiler | None = None

    def matcher(self, grammar: Grammar, output_ids: tuple[int, ...]) -> "Matcher":
        """Return a matcher that has accepted ``output_ids``.

        Raises:
            InvalidRequest: the schema cannot be compiled, or the model has no tokenizer.
            GrammarMismatch: ``output_ids`` do not follow the grammar.
        """
        if self._compiler is None:
            # Here and not above: half a second of imports that most workers never need.
            from shared.engine.sampling.xgrammar_compiler import XgrammarCompiler

            self._compiler = XgrammarCompiler(
                self._model_dir, self._vocab_size, self._end_tokens, self._threads
            )
        return self._compiler.matcher(grammar, output_ids)
