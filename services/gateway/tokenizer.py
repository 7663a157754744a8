"""The model's tokenizer, through `tokenizers` alone: no torch, ready in a fraction of a second."""

from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders

from services.gateway.chat_template import load_chat_template, special_text
from services.gateway.detokenize import (
    ByteDetokenizer,
    BytePieces,
    Detokenizer,
    WindowDetokenizer,
)
from services.gateway.model_facts import read_json, read_model_facts
from shared.errors import InvalidRequest, UnsupportedModel


class Tokenizer:
    """Text to token ids and back, chat template included.

    ``max_model_len`` and ``vocab_size`` are the model's; ``eos_token_ids`` end an output.
    """

    def __init__(self, model_dir: Path) -> None:
        """Load from a safetensors directory.

        Raises:
            UnsupportedModel: files are damaged, missing, or have no fast tokenizer.
        """
        facts = read_model_facts(model_dir)
        self._tokenizer = _load(model_dir)
        self._chat_template = load_chat_template(model_dir)
        self.max_model_len = facts.max_model_len
        self.vocab_size = facts.vocab_size
        eos = special_text(read_json(model_dir / "tokenizer_config.json").get("eos_token"))
        named = None if eos is None else self._tokenizer.token_to_id(eos)
        self.eos_token_ids = tuple(
            sorted({*facts.eos_token_ids, *([] if named is None else [named])})
        )
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = frozenset(i for i, token in added.items() if token.special)
        size = max(
            self._tokenizer.get_vocab_size(with_added_tokens=True), max(added, default=0) + 1
        )
        self._names = [self._tokenizer.id_to_token(i) for i in range(size)]
        byte_level = isinstance(self._tokenizer.decoder, decoders.ByteLevel)
        self._pieces = [_to_bytes(name or "") for name in self._names] if byte_level else None
        self._visible = (
            BytePieces([b"" if i in self._special else p for i, p in enumerate(self._pieces)])
            if self._pieces is not None
            else None
        )
        self._longest = self._longest_piece()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Return the token ids of ``text``. Takes about 1 ms per 5000 characters."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def least_tokens(self, text: str) -> int:
        """Return a quick lower bound of ``len(encode(text))``, 0 if none is known."""
        return len(text.encode("utf-8", "replace")) // self._longest if self._longest else 0

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids`` without special tokens."""
        detokenizer = self.detokenizer()
        return "".join([detokenizer.push(i) for i in ids]) + detokenizer.flush()

    def detokenizer(self) -> Detokenizer:
        """Return a fresh incremental decoder that skips special tokens."""
        if self._visible is not None:
            return ByteDetokenizer(self._visible)
        return WindowDetokenizer(self._decode_window, self._special)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes one token stands for, special tokens by name; empty if unknown."""
        if not 0 <= token < len(self._names) or self._names[token] is None:
            return b""
        if self._pieces is not None:
            return self._pieces[token]
        if token in self._special:
            return str(self._names[token]).encode()
        name = str(self._names[token])
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return bytes([int(name[3:5], 16)])
        return name.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()

    def chat_text(self, messages: Sequence[dict[str, str]]) -> str:
        """Return a conversation as prompt text, special tokens written out.

        Raises:
            InvalidRequest: the model has no chat template, or it refuses the messages.
        """
        if self._chat_template is None:
            raise InvalidRequest(
                "this model has no chat template: use /v1/completions", param="messages"
            )
        return self._chat_template.render(messages)

    def _decode_window(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _longest_piece(self) -> int:
        """Bytes of the longest token, 0 where a normalizer may shorten the text."""
        if self._pieces is None or self._tokenizer.normalizer is not None:
            return 0
        return max((len(piece) for piece in self._pieces), default=0)


def _load(model_dir: Path) -> tokenizers.Tokenizer:
    file = model_dir / "tokenizer.json"
    try:
        if file.exists():
            return tokenizers.Tokenizer.from_file(str(file))
        # Imported late: it brings torch, and only models without tokenizer.json need it.
        from transformers import AutoTokenizer

        slow = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
        found: tokenizers.Tokenizer = slow.backend_tokenizer
        return found
    except Exception as error:
        raise UnsupportedModel(f"cannot load a tokenizer from {model_dir}: {error}") from error


def _to_bytes(name: str) -> bytes:
    """Undo GPT-2's byte-to-character map, as `tokenizers`' ByteLevel decoder does."""
    try:
        return bytes([_BYTES[character] for character in name])
    except KeyError:
        return name.encode()


def _byte_of_character() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_of_character()
