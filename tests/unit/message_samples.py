"""Instances of every wire message, made from the types alone, and their golden bytes.

``python -m tests.unit.message_samples`` adds golden bytes of new messages. It never changes
those that are there: they stand for peers of an earlier build. A wanted break raises the
wire version and deletes the file first.
"""

import json
from pathlib import Path
from typing import Final, get_args

import msgspec
from msgspec import Struct, inspect

from diptych import wire
from shared.messages import bulk, gateway_router, prefill_decode, router_worker

GOLDEN: Final = Path(__file__).parent / "golden" / "messages.json"

LINKS: Final[dict[str, object]] = {
    "client->gateway": wire.FromClient,
    "gateway->client": wire.ToClient,
    "gateway->router": gateway_router.FromGateway,
    "router->gateway": gateway_router.ToGateway,
    "worker->router": router_worker.FromWorker,
    "router->worker": router_worker.ToWorker,
    "decode->prefill": prefill_decode.FromDecode,
    "prefill->decode": prefill_decode.ToDecode,
    "reader->server": bulk.FromReader,
    "server->reader": bulk.ToReader,
}


def members(link: str) -> list[type[Struct]]:
    """Return the message types of a link."""
    return list(get_args(LINKS[link]))


def sample(message: type[Struct], *, full: bool) -> Struct:
    """Return an instance: every field set, or only those without a default."""
    made = _value(inspect.type_info(message), full)
    assert isinstance(made, Struct)
    return made


def _value(node: inspect.Type, full: bool) -> object:
    if isinstance(node, inspect.StructType):
        wanted = [field for field in node.fields if full or field.required]
        return node.cls(**{field.name: _value(field.type, full) for field in wanted})
    if isinstance(node, inspect.UnionType):
        arms = [arm for arm in node.types if not isinstance(arm, inspect.NoneType)]
        return _value(arms[0], full)
    if isinstance(node, inspect.LiteralType):
        return node.values[-1]
    if isinstance(node, inspect.VarTupleType):
        return tuple(_value(node.item_type, full) for _ in range(2 if full else 0))
    if isinstance(node, inspect.TupleType):
        return tuple(_value(item, full) for item in node.item_types)
    if isinstance(node, inspect.DictType):
        return {_value(node.key_type, full): _value(node.value_type, full)} if full else {}
    if isinstance(node, inspect.BytesType) and node.min_length:
        return bytes(range(node.min_length))
    plain: dict[type[inspect.Type], object] = {
        inspect.IntType: 2**53 - 1,
        inspect.FloatType: 0.125,
        inspect.BoolType: True,
        inspect.StrType: "text \u00e9\U0001f642",
        inspect.BytesType: b"\x00\xff",
    }
    return plain[type(node)]


def as_json(message: Struct) -> object:
    """Return the content as plain JSON values."""
    return json.loads(msgspec.json.encode(message))


def main() -> None:
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    for link in LINKS:
        for message in members(link):
            for kind in ("full", "minimal"):
                made = sample(message, full=kind == "full")
                entry = {"bytes": msgspec.msgpack.encode(made).hex(), "means": as_json(made)}
                golden.setdefault(f"{link} {message.__name__} {kind}", entry)
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps(golden, indent=1, ensure_ascii=True) + "\n")


if __name__ == "__main__":
    main()
