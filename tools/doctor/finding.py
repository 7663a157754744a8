"""What a check found."""

from collections.abc import Callable
from typing import Literal

from msgspec import Struct

from shared.errors import DiptychError

Level = Literal["ok", "warn", "fail"]


class Finding(Struct, frozen=True, kw_only=True):
    """One line of ``diptych doctor``. ``text`` of a failure says what to do about it."""

    topic: str
    level: Level
    text: str


def ok(topic: str, text: str) -> Finding:
    """Nothing to do."""
    return Finding(topic=topic, level="ok", text=text)


def warn(topic: str, text: str) -> Finding:
    """It works, but not as well as it could."""
    return Finding(topic=topic, level="warn", text=text)


def fail(topic: str, text: str) -> Finding:
    """A deployment cannot run like this."""
    return Finding(topic=topic, level="fail", text=text)


def attempt(topic: str, check: Callable[[], str]) -> Finding:
    """Run a check that raises ``DiptychError`` with its sentence, or returns its good news."""
    try:
        return ok(topic, check())
    except DiptychError as error:
        return fail(topic, error.message)
