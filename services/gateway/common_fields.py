"""Request fields that both generation endpoints have besides sampling."""

from typing import Annotated

from msgspec import Meta, Struct

from shared.errors import InvalidRequest

NumOutputs = Annotated[int, Meta(ge=1, le=128)]


class StreamOptions(Struct, frozen=True):
    """``include_usage``: one more chunk with the usage before the end."""

    include_usage: bool | None = None


class CommonFields(Struct, frozen=True, kw_only=True):
    """``timeline`` is Diptych's: every choice tells where its time went."""

    model: str | None = None
    n: NumOutputs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    timeline: bool | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


def check_common(fields: CommonFields) -> None:
    """Raise ``InvalidRequest`` for stream options without a stream."""
    if fields.stream_options is not None and not fields.stream:
        raise InvalidRequest(
            "stream_options is only allowed when stream is true", param="stream_options"
        )


def refuse(present: bool, param: str, why: str) -> None:
    """Raise ``InvalidRequest`` for a field this server does not support."""
    if present:
        raise InvalidRequest(f"{param} is not supported: {why}", param=param)
