"""JSON schemas are passed to llguidance without keywords that allow everything."""

import json
from pathlib import Path
from typing import Any, Literal

import llguidance
import pytest
from pydantic import AnyUrl, Base64Bytes, BaseModel, FilePath, IPvAnyAddress, Json, SecretStr

from router.preprocess.constrain import without_noops

KNOWN = ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
UNKNOWN = ["password", "binary", "uri-reference", "json-string", "iri", "regex", "json-pointer", "x" * 100_000, ""]
ROOT = Path(__file__).parents[3]
SECRET, TEXT = {"type": "string", "format": "password"}, {"type": "string"}


def problem_of(schema: Any) -> str:
    return llguidance.LLMatcher.validate_grammar(json.dumps({"grammars": [{"json_schema": schema}]}))


@pytest.mark.parametrize("name", KNOWN)
def test_known_formats_are_kept(name: str) -> None:
    schema = {"type": "string", "format": name}
    assert without_noops(schema) == schema
    assert f"`{name}`" in (ROOT / "docs" / "structured-output.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_formats_are_removed(name: str) -> None:
    schema = {"type": "string", "maxLength": 3, "format": name}
    assert problem_of(schema)
    assert without_noops(schema) == {"type": "string", "maxLength": 3}
    assert "format" in schema


@pytest.mark.parametrize(
    "around",
    [
        {"properties": {"format": SECRET, "default": SECRET, "enum": SECRET}},
        {"patternProperties": {"^a": SECRET}, "additionalProperties": SECRET},
        {"items": SECRET, "prefixItems": [SECRET, True]},
        {"items": [SECRET], "additionalItems": SECRET},
        {"allOf": [{"anyOf": [SECRET, {"oneOf": [SECRET]}]}]},
        {"$defs": {"a": SECRET}, "definitions": {"a": SECRET}, "$ref": "#/$defs/a"},
    ],
)
def test_nested_schemas_are_found(around: dict[str, Any]) -> None:
    assert without_noops(around) == json.loads(json.dumps(around).replace(json.dumps(SECRET), json.dumps(TEXT)))
    assert problem_of(without_noops(around)) == ""


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [SECRET, {"uniqueItems": False}]},
        {"const": {"properties": {"a": SECRET}}},
        {"default": SECRET, "examples": [SECRET], "x-other": SECRET},
        {"properties": {"format": True, "uniqueItems": False, "not": False, "if": True}},
        {"$defs": {"uniqueItems": False}},
        {"format": 5, "properties": 5, "allOf": 5, "items": 5},
    ],
)
def test_values_that_are_not_schemas_are_kept(schema: dict[str, Any]) -> None:
    assert without_noops(schema) == schema


@pytest.mark.parametrize(
    "schema", [{"uniqueItems": False}, {"propertyNames": {"type": "string", "format": "password", "title": "Name"}}]
)
def test_keywords_that_allow_everything_are_removed(schema: dict[str, Any]) -> None:
    assert problem_of(schema)
    assert without_noops({"anyOf": [{"type": "array"} | schema]}) == {"anyOf": [{"type": "array"}]}


NAMES: list[Any] = [{"type": "string", "maxLength": 3}, {"format": "uri"}, False]


@pytest.mark.parametrize(
    "schema", [{"uniqueItems": True}, {"uniqueItems": 0}, *({"propertyNames": names} for names in NAMES)]
)
def test_keywords_that_constrain_are_left_to_llguidance(schema: dict[str, Any]) -> None:
    assert without_noops(schema) == schema
    assert problem_of(schema)


def test_removed_keywords_can_leave_one_that_allows_everything() -> None:
    assert without_noops({"propertyNames": {"format": "regex", "uniqueItems": False}}) == {}


class Person(BaseModel):
    key: SecretStr
    photo: bytes
    code: Base64Bytes
    home: FilePath
    note: Json[Any]
    address: IPvAnyAddress
    site: AnyUrl
    kind: Literal["a"]


def test_formats_of_pydantic_are_accepted() -> None:
    assert problem_of(without_noops(Person.model_json_schema())) == ""
