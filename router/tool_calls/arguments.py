"""Values that a model writes as plain text, by the types in a function's schema."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

ParameterTypes = Mapping[str, Sequence[str]]
"""JSON types that the parameters of a function can have; see ``types_of_parameters``."""

_KINDS: dict[type, str] = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
_KINDS |= {dict: "object", type(None): "null"}
_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""Values as some chat templates write them, in Python's words."""


def types_of_parameters(schema: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the JSON types that each parameter of a function can have. Parameters of any type are left out."""
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return {}
    types = JsonTypes(schema)
    found = {name: types.of(own) for name, own in properties.items()}
    return {name: sorted(each) for name, each in found.items() if each is not None}


class JsonTypes:
    """JSON types that the parts of a schema allow."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        """Follow references in ``root``."""
        self._root = root
        self._known: dict[str, frozenset[str] | None] = {}
        """Types by reference: each is followed once, since references can form cycles."""

    def of(self, schema: Any, depth: int = 8) -> frozenset[str] | None:
        """Return the types that a schema allows, or None for any, or if it is nested more than ``depth`` deep."""
        if not isinstance(schema, dict) or depth == 0:
            return None
        match schema:
            case {"$ref": str(path)}:
                if path not in self._known:
                    self._known[path] = None
                    self._known[path] = self.of(_resolved(path, self._root), depth - 1)
                return self._known[path]
            case {"enum": list(values)}:
                return frozenset(_KINDS[type(value)] for value in values)
            case {"const": value}:
                return frozenset([_KINDS[type(value)]])
            case {"type": str(name)}:
                return frozenset([name])
            case {"type": list(names)}:
                return frozenset(name for name in names if isinstance(name, str))
            case {"anyOf": list(inner)} | {"oneOf": list(inner)}:
                several = [self.of(each, depth - 1) for each in inner]
                known = [types for types in several if types is not None]
                return frozenset().union(*known) if len(known) == len(several) else None
            case {"allOf": [only]}:
                return self.of(only, depth - 1)
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
