"""``diptych chat``: talk to the model in the terminal and see how fast it answers."""

import time
from collections.abc import Callable
from typing import Literal

from msgspec import Struct
from rich.console import Console

import diptych
from shared.config import Deployment
from shared.errors import ResourceMissing
from tools.running import client, require_gateway
from tools.wrap import WordWrap

_CONNECT_TIMEOUT = 10.0
_HELP = "/quit leaves, /new begins a new conversation, Ctrl-C stops an answer"


class Settings(Struct, frozen=True, kw_only=True):
    """How the answers are sampled."""

    system: str | None
    temperature: float
    max_tokens: int


class Speed(Struct, frozen=True, kw_only=True):
    """Seconds to the first token, and per token after it (None below two tokens)."""

    ttft: float
    tpot: float | None
    tokens: int

    def line(self) -> str:
        """Return it for the terminal."""
        parts = [f"{self.tokens} tokens", f"TTFT {1e3 * self.ttft:.0f} ms"]
        if self.tpot is not None:
            parts.append(f"TPOT {1e3 * self.tpot:.1f} ms")
        return ", ".join(parts)


def chat(
    deployment: Deployment, console: Console, settings: Settings, ask: Callable[[str], str]
) -> None:
    """Read lines with ``ask`` until /quit or the end of input.

    Raises:
        ResourceMissing: the deployment does not run.
    """
    require_gateway(deployment)
    with client(deployment, connect_timeout=_CONNECT_TIMEOUT) as link:
        try:
            ready = link.wait_ready(_CONNECT_TIMEOUT)
        except diptych.DiptychError as error:
            raise ResourceMissing(f"the gateway does not answer: {error}") from error
        console.print(f"{ready.model}, context {ready.max_model_len} tokens. {_HELP}", style="dim")
        turns = _beginning(settings)
        while True:
            try:
                line = ask("\n> ").strip()
            except (EOFError, KeyboardInterrupt):
                return
            if line == "/quit":
                return
            if line == "/new":
                turns = _beginning(settings)
            elif line.startswith("/"):
                console.print(_HELP, style="dim")
            elif line:
                _one_answer(link, console, settings, turns, line)


def _beginning(settings: Settings) -> list[diptych.Message]:
    return [_said("system", settings.system)] if settings.system else []


def _said(role: Literal["system", "user", "assistant"], content: str) -> diptych.Message:
    return diptych.Message(role=role, content=content)


def _one_answer(
    link: diptych.Client,
    console: Console,
    settings: Settings,
    turns: list[diptych.Message],
    line: str,
) -> None:
    turns.append(_said("user", line))
    try:
        answer = _stream(link, console, settings, turns)
    except KeyboardInterrupt:
        console.print("\n(stopped)", style="dim")
        turns.pop()
    except diptych.DiptychError as error:
        console.print(f"\nerror: {error}", style="red", markup=False)
        turns.pop()
    else:
        turns.append(_said("assistant", answer))


def _stream(
    link: diptych.Client, console: Console, settings: Settings, turns: list[diptych.Message]
) -> str:
    begun = time.monotonic()
    first = last = None
    text, tokens = "", 0
    wrap = WordWrap(console.width - 1) if console.is_terminal else None
    with link.chat_stream(
        turns, temperature=settings.temperature, max_tokens=settings.max_tokens
    ) as stream:
        for chunk in stream:
            if chunk.token_ids:
                last = time.monotonic()
                first = first or last
                tokens += len(chunk.token_ids)
            text += chunk.text
            console.file.write(wrap.feed(chunk.text) if wrap else chunk.text)
            console.file.flush()
    console.print()
    if first is not None and last is not None:
        tpot = (last - first) / (tokens - 1) if tokens > 1 else None
        speed = Speed(ttft=first - begun, tpot=tpot, tokens=tokens)
        console.print(speed.line(), style="dim", highlight=False)
    return text
