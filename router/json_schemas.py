"""JSON Schemas that llguidance accepts: without keywords that it refuses although they forbid nothing."""

from collections.abc import Mapping
from typing import Any

from cluster.grammar import knows_format

_HOLDING = frozenset(
    {"additionalProperties", "additionalItems", "unevaluatedProperties", "unevaluatedItems", "items", "prefixItems"}
    | {"contains", "propertyNames", "not", "if", "then", "else", "allOf", "anyOf", "oneOf"}
)
"""Keywords that hold a schema or a list of schemas."""
_HOLDING_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords that hold schemas by name; all others hold none, whatever their values look like."""
_NOTES = frozenset({"title", "description", "$comment", "default", "examples", "deprecated", "readOnly", "writeOnly"})
"""Keywords that do not affect validity."""


def without_noops(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema without string formats that are mere annotations, and keywords that forbid nothing."""
    inner = {keyword: _cleaned(keyword, value) for keyword, value in schema.items()}
    return {keyword: value for keyword, value in inner.items() if not _forbids_nothing(keyword, value)}


def _cleaned(keyword: str, value: Any) -> Any:
    """Return a keyword's value with its schemas cleaned."""
    if keyword in _HOLDING_NAMED and isinstance(value, dict):
        return {name: _cleaned_schema(named) for name, named in value.items()}
    if keyword in _HOLDING:
        return [_cleaned_schema(listed) for listed in value] if isinstance(value, list) else _cleaned_schema(value)
    return value


def _cleaned_schema(schema: Any) -> Any:
    return without_noops(schema) if isinstance(schema, dict) else schema


def _forbids_nothing(keyword: str, value: Any) -> bool:
    """Return whether llguidance refuses a keyword although every JSON value is valid by it."""
    match keyword:
        case "format":
            return isinstance(value, str) and not knows_format(value)
        case "uniqueItems":
            return value is False
        case "propertyNames" if isinstance(value, dict):
            return {name: value[name] for name in value.keys() - _NOTES} in ({}, {"type": "string"})
    return False
