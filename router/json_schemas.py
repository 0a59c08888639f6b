"""JSON Schemas as llguidance takes them: without what it refuses although nothing is forbidden by it."""

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
"""Keywords that say nothing of what is valid."""


def mended(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The same schema, without formats of strings that are only annotations here, and keywords that forbid nothing."""
    copy: dict[str, Any] = json.loads(json.dumps(schema))
    # Parents come before their children in it, and are easier judged after them.
    for found in reversed(_schemas(copy)):
        name = found.get("format")
        if isinstance(name, str) and not knows_format(name):
            del found["format"]
        for keyword in [keyword for keyword in found if _forbids_nothing(found, keyword)]:
            del found[keyword]
    return copy


def _schemas(root: dict[str, Any]) -> list[dict[str, Any]]:
    """All in it, itself first."""
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
    """What a JSON pointer shows, which may lie where no schema is looked for; None for nothing."""
    place: Any = root
    for step in unquote(reference[2:]).split("/"):
        if step in _HOLDING_DATA or not isinstance(place, dict):
            return None
        place = place.get(step.replace("~1", "/").replace("~0", "~"))
    return place


def _forbids_nothing(schema: Mapping[str, Any], keyword: str) -> bool:
    """A keyword that llguidance refuses, with a value that every JSON value is valid by."""
    value = schema[keyword]
    match keyword:
        case "uniqueItems" | "not":
            return value is False
        case "unevaluatedProperties" | "unevaluatedItems":
            return _takes_all(value)
        case "propertyNames":
            return _takes_all(value) or (isinstance(value, dict) and _said(value) == {"type": "string"})
        case "dependentRequired" | "dependentSchemas" | "dependencies":
            return isinstance(value, dict) and all(needed == [] or _takes_all(needed) for needed in value.values())
        case "minContains" | "maxContains":
            return "contains" not in schema
        case "if":
            return all(_takes_all(schema.get(branch, True)) for branch in ("then", "else"))
        case "then" | "else":
            return "if" not in schema or _takes_all(value)
    return False


def _takes_all(schema: Any) -> bool:
    return schema is True or (isinstance(schema, dict) and not _said(schema))


def _said(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {keyword: value for keyword, value in schema.items() if keyword not in _NOTES}
