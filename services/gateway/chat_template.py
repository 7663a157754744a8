"""Renders the chat template that comes with a model, in Jinja's sandbox."""

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.gateway.model_facts import read_json
from shared.errors import InvalidRequest, UnsupportedModel


class ChatTemplate:
    """A compiled template; the conventions are those of transformers' ``apply_chat_template``.

    Raises:
        UnsupportedModel: the template does not compile.
    """

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise UnsupportedModel(f"the chat template does not compile: {error}") from error
        self._special_tokens = special_tokens

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        """Return the prompt text up to where the assistant's answer starts.

        Raises:
            InvalidRequest: the template refuses the messages (wrong roles, wrong order).
        """
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, **self._special_tokens
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error


def load_chat_template(model_dir: Path) -> ChatTemplate | None:
    """Return the model's template, None if it has none (a base model)."""
    config = read_json(model_dir / "tokenizer_config.json")
    file = model_dir / "chat_template.jinja"
    source = file.read_text("utf-8") if file.exists() else config.get("chat_template")
    if isinstance(source, list):
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default")
    if source is None:
        return None
    special = {
        name: text
        for name in ("bos_token", "eos_token", "unk_token", "pad_token")
        if (text := special_text(config.get(name))) is not None
    }
    return ChatTemplate(source, special)


def special_text(entry: object) -> str | None:
    """Return the text of a special token as ``tokenizer_config.json`` writes it."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def _to_json(value: object, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
