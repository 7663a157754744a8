"""Grammar-constrained output through xgrammar."""

import re
from pathlib import Path
from typing import Any, Final

import numpy as np
import xgrammar
from numpy.typing import NDArray
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from shared.engine.sampling.distribution import Row
from shared.engine.sampling.grammar import GrammarMismatch
from shared.errors import InvalidRequest
from shared.messages.request import Grammar

_CACHE_BYTES: Final = 64 << 20
_MAX_WHITESPACE: Final = 32
"""Longest run of whitespace between JSON elements; unbounded, small models never stop it."""

_SOURCE_PLACE: Final = re.compile(r"\[[\d:]+\] \S+:\d+: (Check failed: \(.*?\) is false: )?")
"""xgrammar puts time and place in its own source before what was wrong."""

_JSON_OBJECT: Final = '{"type": "object"}'


_CONTROL: Final = frozenset(range(0x20)) - {0x0A, 0x0D}
"""Bytes that xgrammar lets into strings of limited length, where JSON forbids them."""

Mask = NDArray[np.bool_]


class XgrammarCompiler:
    """Compiles grammars for one model; the most recently used stay, up to 64 MiB.

    Raises:
        InvalidRequest: the model has no tokenizer.
    """

    def __init__(
        self, model_dir: Path, vocab_size: int, end_tokens: tuple[int, ...], threads: int
    ) -> None:
        self._vocab_size = vocab_size
        self._end_tokens = end_tokens
        self._control: Mask = np.zeros(vocab_size, dtype=bool)
        self._compiler: Any = self._load(model_dir, threads)

    def matcher(self, grammar: Grammar, output_ids: tuple[int, ...]) -> "Matcher":
        """Return a matcher that has accepted ``output_ids``.

        Raises:
            InvalidRequest: the schema cannot be compiled.
            GrammarMismatch: ``output_ids`` do not follow the grammar.
        """
        compiled = self._compile(grammar)
        matcher = Matcher(compiled, self._vocab_size, self._end_tokens, self._control)
        for token in output_ids:
            matcher.accept(token)
        return matcher

    def _compile(self, grammar: Grammar) -> Any:  # noqa: ANN401
        schema = _JSON_OBJECT if grammar.kind == "json_object" else grammar.schema
        try:
            return self._compiler.compile_json_schema(
                schema,
                strict_mode=grammar.kind == "json_schema",
                max_whitespace_cnt=_MAX_WHITESPACE,
            )
        except (RuntimeError, ValueError, TypeError) as error:
            reason = _SOURCE_PLACE.sub("", str(error)).strip()
            raise InvalidRequest(
                f"the JSON schema cannot be used: {reason}", param="response_format"
            ) from error

    def _load(self, model_dir: Path, threads: int) -> Any:  # noqa: ANN401
        tokenizer = _tokenizer(model_dir)
        info = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer,
            vocab_size=self._vocab_size,
            stop_token_ids=list(self._end_tokens) or None,
        )
        for token, piece in enumerate(info.decoded_vocab[: self._vocab_size]):
            self._control[token] = any(byte in _CONTROL for byte in piece)
        self._control[list(self._end_tokens)] = False
        return xgrammar.GrammarCompiler(info, max_threads=threads, cache_limit_bytes=_CACHE_BYTES)


def _tokenizer(model_dir: Path) -> Any:  # noqa: ANN401
    # AutoTokenizer finds the same in a second more: it imports every model's configuration.
    file = model_dir / "tokenizer.json"
    try:
        if file.is_file():
            return PreTrainedTokenizerFast(tokenizer_file=str(file))
        return AutoTokenizer.from_pretrained(
            model_dir, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise InvalidRequest(
            f"this model has no tokenizer, so its output cannot follow a grammar: {error}",
            param="response_format",
        ) from error


class Matcher:
    """Where one sequence stands in its grammar.

    End tokens are allowed only where the grammar is complete. Past an end token (``ignore_eos``)
    nothing but end tokens is allowed, so that the text stays what the grammar made it.
    """

    def __init__(
        self,
        compiled: Any,  # noqa: ANN401
        vocab_size: int,
        end_tokens: tuple[int, ...],
        control: Mask,
    ) -> None:
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._bits: NDArray[np.int32] = np.empty((1, -(-vocab_size // 32)), dtype=np.int32)
        self._vocab_size = vocab_size
        self._end_tokens = end_tokens
        self._control = control

    def forbid(self, row: Row) -> None:
        """Set the logits of tokens that the grammar does not allow next to -inf, in place."""
        if self._matcher.is_terminated():
            forbidden = np.ones(self._vocab_size, dtype=bool)
            forbidden[list(self._end_tokens)] = False
        else:
            self._matcher.fill_next_token_bitmask(self._bits)
            bits = np.unpackbits(self._bits.view(np.uint8)[0], bitorder="little")
            forbidden = ~bits[: self._vocab_size].view(bool) | self._control
        row[forbidden] = -np.inf

    def accept(self, token: int) -> None:
        """Advance by one token. Raises ``GrammarMismatch`` when it is not allowed here."""
        if self._matcher.is_terminated():
            if token in self._end_tokens:
                return
        elif self._matcher.accept_token(token):
            return
        raise GrammarMismatch(f"token {token} does not follow the grammar")
