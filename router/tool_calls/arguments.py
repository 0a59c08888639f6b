"""Values that a model writes as plain text, by the types in a function's schema."""

import json
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

_KINDS: dict[type, str] = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
_KINDS |= {dict: "object", type(None): "null"}
_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""Values as some chat templates write them, in Python's words."""


def types_of_parameters(schema: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the JSON types that each parameter of a function can have. Parameters of any type are left out."""
    properties = schema.get("properties")
    found = {name: json_types(own, schema) for name, own in properties.items()} if isinstance(properties, dict) else {}
    return {name: sorted(types) for name, types in found.items() if types is not None}


def json_types(schema: Any, root: Mapping[str, Any], *, depth: int = 8) -> frozenset[str] | None:
    """Return the JSON types that a schema allows, or None for any. References are followed in ``root``."""
    if not isinstance(schema, dict) or depth == 0:
        return None
    match schema:
        case {"$ref": str(path)}:
            return json_types(_resolved(path, root), root, depth=depth - 1)
        case {"enum": list(values)}:
            return frozenset(_KINDS[type(value)] for value in values)
        case {"const": value}:
            return frozenset([_KINDS[type(value)]])
        case {"type": str(name)}:
            return frozenset([name])
        case {"type": list(names)}:
            return frozenset(filter(lambda name: isinstance(name, str), names))
        case {"anyOf": list(inner)} | {"oneOf": list(inner)}:
            several = [json_types(each, root, depth=depth - 1) for each in inner]
            known = [types for types in several if types is not None]
            return frozenset().union(*known) if len(known) == len(several) else None
        case {"allOf": [only]}:
            return json_types(only, root, depth=depth - 1)
    return None


def _resolved(path: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for name in path.removeprefix("#").split("/")[1:]:
        found = found.get(name) if isinstance(found, dict) else None
    return found


def to_json(text: str, types: Collection[str] | None) -> str:
    """Convert a value to JSON: a text unless it is JSON of one of the types, or of any type if ``types`` is None."""
    stripped = text.strip()
    written = stripped if types is None else _PYTHON.get(stripped, stripped)
    kind = _kind(written)
    if kind is not None and (types is None or _fits(kind, types) or "string" not in types):
        return written
    return json.dumps(text, ensure_ascii=False)


def _fits(kind: str, types: Collection[str]) -> bool:
    return kind != "string" and (kind in types or (kind == "integer" and "number" in types))


def _kind(written: str) -> str | None:
    """Return the type of a value in JSON, or None if it is not JSON."""
    try:
        return _KINDS[type(msgspec.json.decode(written))]
    except (msgspec.DecodeError, RecursionError):
        return None
