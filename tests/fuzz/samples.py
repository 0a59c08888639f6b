"""One sample of every message, with all fields that its type allows."""

from enum import Enum
from typing import Any, get_args

import msgspec
from msgspec import inspect

from cluster.spec.messages import Message
from cluster.spec.wire import TokenIds, from_wire

_MOST_DEPTH = 20


def messages() -> list[Message]:
    """Return the messages in the order of the union."""
    return [_message(kind) for kind in get_args(Message)]


def _message(kind: Any) -> Message:
    made: Message = msgspec.convert(_tree(inspect.type_info(kind), 0), kind, dec_hook=from_wire)
    return made


def _tree(kind: inspect.Type, depth: int) -> Any:
    """Return a value of a type as MessagePack has it. Collections have one element, unions their last variant."""
    assert depth < _MOST_DEPTH, f"a message without end: {kind}"
    match kind:
        case inspect.StructType():
            fields = {field.encode_name: _tree(field.type, depth + 1) for field in kind.fields}
            tree: Any = fields if not kind.array_like else list(fields.values())
            return {kind.tag_field: kind.tag, **tree} if kind.tag_field else tree
        case inspect.UnionType():
            return _tree(next(part for part in kind.types if not isinstance(part, inspect.NoneType)), depth + 1)
        case inspect.ListType() | inspect.VarTupleType() | inspect.SetType() | inspect.FrozenSetType():
            return [_tree(kind.item_type, depth + 1)]
        case inspect.TupleType():
            return [_tree(part, depth + 1) for part in kind.item_types]
        case inspect.DictType():
            return {_key(_tree(kind.key_type, depth + 1)): _tree(kind.value_type, depth + 1)}
        case inspect.EnumType():
            (first, *_) = list[Enum](kind.cls)
            return first.value
        case inspect.LiteralType():
            return kind.values[0]
        case _:
            return _VALUES[type(kind)]


def _key(tree: Any) -> Any:
    """Return a tree that can be a dictionary key, which a list cannot."""
    return tuple(tree) if isinstance(tree, list) else tree


_VALUES: dict[type[inspect.Type], Any] = {
    inspect.BoolType: True,
    inspect.IntType: 3,
    inspect.FloatType: 0.5,
    inspect.StrType: "x",
    inspect.BytesType: b"abc",
    inspect.NoneType: None,
    inspect.AnyType: 1,
    inspect.CustomType: TokenIds.of([3]).packed,
}
