"""``response_format``: constraints on the output."""

from typing import Any, Literal

import msgspec
from msgspec import Struct

from services.gateway.grammar import GrammarChecker
from shared.errors import InvalidRequest
from shared.messages.request import Grammar

FormatKind = Literal["text", "json_object", "json_schema"]
_PARAM = "response_format.json_schema.schema"


class JsonSchema(Struct, frozen=True, kw_only=True):
    """``strict`` false is taken as true: the output always follows the schema."""

    schema: dict[str, Any] | bool | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, frozen=True, kw_only=True):
    """OpenAI's ``response_format``."""

    type: FormatKind
    json_schema: JsonSchema | None = None


class FormatFields(Struct, frozen=True, kw_only=True):
    """The request's field."""

    response_format: ResponseFormat | None = None


async def read_grammar(checker: GrammarChecker, fields: FormatFields) -> Grammar | None:
    """Return the constraint, None for plain text.

    Raises:
        InvalidRequest: no schema where one is needed, or one that does not compile.
        Overloaded: too many schemas are being checked.
    """
    wanted = fields.response_format
    if wanted is None:
        return None
    found = wanted.json_schema
    text = None if found is None or found.schema is None else msgspec.json.encode(found.schema)
    schema = None if text is None else text.decode()
    return await make_grammar(checker, wanted.type, schema, _PARAM)


async def make_grammar(
    checker: GrammarChecker, kind: FormatKind, schema: str | None, param: str
) -> Grammar | None:
    """Return the constraint of a kind; ``schema`` is JSON text. Errors as above."""
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar(kind="json_object")
    if schema is None:
        raise InvalidRequest("json_schema needs a schema", param=param)
    return await checker.check(schema, param)
