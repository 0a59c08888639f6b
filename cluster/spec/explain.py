"""Problems of a deploy YAML in plain words, from pydantic's errors and the JSON schema."""

import difflib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from cluster.spec.config import DeployConfig
from cluster.spec.errors import Problem

Keys = tuple[str, ...]

_LONGEST_VALUE = 60
_PATTERNS = {
    r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$": "1 to 63 lower case letters, digits and dashes, no dash first or last",
    r"^(\*|[a-z][a-z0-9+.-]*://[^/?#*\sA-Z]+)$": "`*`, or an origin as browsers name it, such as https://chat.example",
}


def explain(error: ValidationError) -> list[Problem]:
    """Return one problem for each key that pydantic refused."""
    problems = {}
    for item in error.errors(include_url=False):
        keys = tuple(str(part) for part in item["loc"])
        unknown = item["type"] == "extra_forbidden"
        message = _unknown(keys) if unknown else f"got {show(item['input'])}; allowed: {allowed(keys)}"
        problems[keys] = Problem(".".join(keys), message)
    return list(problems.values())


def show(value: object) -> str:
    """Return a given value as a short text, as YAML writes it."""
    match value:
        case None:
            return "nothing"
        case bool():
            return str(value).lower()
        case str():
            return repr(value if len(value) <= _LONGEST_VALUE else f"{value[:_LONGEST_VALUE]}...")
        case Mapping():
            return "a mapping"
        case Sequence():
            return "a list"
        case _:
            return str(value)[:_LONGEST_VALUE]


def allowed(keys: Keys) -> str:
    """Return the allowed values of a key in words."""
    schema = _schema_of(keys)
    options = [option for option in schema.get("anyOf", [schema]) if option.get("type") != "null"]
    assert len(options) == 1, f"a key of several types has no words yet: {keys}"
    return _words(_resolve(options[0], _root()))


def _unknown(keys: Keys) -> str:
    *parents, key = keys
    known = list(_schema_of(tuple(parents))["properties"])
    nearest = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {nearest[0]}? " if nearest else ""
    return f"unknown key; {hint}allowed: {', '.join(known)}"


@functools.cache
def _root() -> dict[str, Any]:
    return DeployConfig.model_json_schema()


def _schema_of(keys: Keys) -> dict[str, Any]:
    root = _root()
    node = root
    for key in keys:
        node = _resolve(node["items"] if node.get("type") == "array" else node["properties"][key], root)
    return node


def _resolve(node: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    reference = node.get("$ref")
    if reference is None:
        return node
    resolved: dict[str, Any] = root["$defs"][reference.rsplit("/", 1)[-1]]
    return resolved


def _words(schema: dict[str, Any]) -> str:
    match schema:
        case {"enum": values}:
            return ", ".join(values)
        case {"properties": keys}:
            return f"keys and values, with the keys {', '.join(keys)}"
        case {"type": "integer"}:
            return f"a whole number{_bounds(schema)}"
        case {"type": "number"}:
            return f"a number{_bounds(schema)}"
        case {"type": "boolean"}:
            return "true or false"
        case {"pattern": pattern}:
            return _PATTERNS[pattern]
        case {"type": "array", "items": item}:
            return f"a list; in it: {_words(item)}"
        case _:
            assert schema.get("type") == "string", f"no words for {schema}"
            return "a text that is not empty, in quotes if it looks like a number"


def _bounds(schema: dict[str, Any]) -> str:
    match schema:
        case {"minimum": low, "maximum": high}:
            return f" from {low} to {high}"
        case {"exclusiveMinimum": low, "maximum": high}:
            return f" over {low}, {high} at most"
        case {"minimum": low}:
            return f", {low} or more"
        case _:
            return f" over {schema['exclusiveMinimum']}"
