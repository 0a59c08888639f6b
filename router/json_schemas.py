"""JSON Schemas that llguidance accepts: without keywords that it refuses although they forbid nothing."""

import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from cluster.grammar import knows_format

_HOLDING_ONE = (
    *("additionalProperties", "additionalItems", "unevaluatedProperties", "unevaluatedItems", "items", "contains"),
    *("propertyNames", "not", "if", "then", "else"),
)
_HOLDING_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_HOLDING_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
"""Keywords that hold schemas; all others hold none, whatever their values look like."""
_HOLDING_DATA = frozenset({"enum", "const", "default", "examples"})
_NOTES = frozenset({"title", "description", "$comment", "default", "examples", "deprecated", "readOnly", "writeOnly"})
"""Keywords that do not affect validity."""


def without_noops(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema without string formats that are mere annotations, and keywords that forbid nothing."""
    copy: dict[str, Any] = json.loads(json.dumps(schema))
    # Parents come before their children, and are easier to judge after them.
    for found in reversed(_schemas(copy)):
        name = found.get("format")
        if isinstance(name, str) and not knows_format(name):
            del found["format"]
        for keyword in [keyword for keyword in found if _forbids_nothing(found, keyword)]:
            del found[keyword]
    return copy


def _schemas(root: dict[str, Any]) -> list[dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    waiting = [root]
    while waiting:
        schema = waiting.pop()
        if id(schema) not in found:
            found[id(schema)] = schema
            waiting += (child for child in _children(root, schema) if isinstance(child, dict))
    return [*found.values()]


def _children(root: dict[str, Any], schema: dict[str, Any]) -> Iterator[Any]:
    for keyword in _HOLDING_ONE:
        yield schema.get(keyword)
    for keyword in _HOLDING_LISTS:
        if isinstance(listed := schema.get(keyword), list):
            yield from listed
    for keyword in _HOLDING_NAMED:
        if isinstance(named := schema.get(keyword), dict):
            yield from named.values()
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#/"):
        yield _referred(root, reference)


def _referred(root: dict[str, Any], reference: str) -> Any:
    """Return the value at a JSON pointer, which may lie outside of schemas; None for nothing."""
    value: Any = root
    for step in unquote(reference[2:]).split("/"):
        if step in _HOLDING_DATA or not isinstance(value, dict):
            return None
        value = value.get(step.replace("~1", "/").replace("~0", "~"))
    return value


def _forbids_nothing(schema: Mapping[str, Any], keyword: str) -> bool:
    """Return whether llguidance refuses a keyword although every JSON value is valid by it."""
    value = schema[keyword]
    match keyword:
        case "uniqueItems" | "not":
            return value is False
        case "unevaluatedProperties" | "unevaluatedItems":
            return _accepts_all(value)
        case "propertyNames":
            return _accepts_all(value) or (isinstance(value, dict) and _without_notes(value) == {"type": "string"})
        case "dependentRequired" | "dependentSchemas" | "dependencies":
            return isinstance(value, dict) and all(needed == [] or _accepts_all(needed) for needed in value.values())
        case "minContains" | "maxContains":
            return "contains" not in schema
        case "if":
            return all(_accepts_all(schema.get(branch, True)) for branch in ("then", "else"))
        case "then" | "else":
            return "if" not in schema or _accepts_all(value)
    return False


def _accepts_all(schema: Any) -> bool:
    return schema is True or (isinstance(schema, dict) and not _without_notes(schema))


def _without_notes(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {keyword: value for keyword, value in schema.items() if keyword not in _NOTES}
