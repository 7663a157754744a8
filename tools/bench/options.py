"""Options of a command as the fields of a struct."""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

import typer
from msgspec import Struct, structs

T = TypeVar("T", bound=Struct)


def with_options(options: type[T]) -> Callable[[Callable[[T], int]], Callable[..., None]]:
    """Make a function of one struct a function of its fields, for typer to read.

    A field is annotated as typer wants a parameter; its default is the parameter's. What it returns
    becomes the exit code.
    """

    def wrap(function: Callable[[T], int]) -> Callable[..., None]:
        def command(**given: Any) -> None:  # noqa: ANN401
            raise typer.Exit(function(options(**given)))

        fields = structs.fields(options)
        hints = get_type_hints(options, include_extras=True)
        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__annotations__ = {field.name: hints[field.name] for field in fields}
        command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=inspect.Parameter.empty if field.required else field.default,
                    annotation=hints[field.name],
                )
                for field in fields
            ]
        )
        return command

    return wrap
