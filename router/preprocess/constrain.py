"""Conversion of a body's structured-output fields to one grammar for ``cluster.grammar``."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from cluster.grammar import knows_format, lark_of, lark_of_regex
from cluster.spec.errors import UserError
from router.errors import ApiError, bad_request
from router.message import CLOSING, OPENING, Thinking
from router.preprocess.body import refuse_unsupported
from router.preprocess.model import ServedModel
from router.preprocess.requests import FORM_FIELDS, GenerationBody

MAX_GRAMMAR_CHARS = 1024 * 1024
"""Maximum length of a grammar, which is sent with the request."""
_WHITE_SPACE = r"( |\n[ \t]{0,40})?"
"""White space between JSON tokens: a space, or a line break with indentation. A model that samples would otherwise
generate any at length."""

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_HOLDING = frozenset(
    {"additionalProperties", "additionalItems", "unevaluatedProperties", "unevaluatedItems", "items", "prefixItems"}
    | {"contains", "propertyNames", "not", "if", "then", "else", "allOf", "anyOf", "oneOf"}
)
"""Keywords whose value is a schema or a list of schemas."""
_HOLDING_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose value is an object of schemas. Other keywords contain no schema, whatever their values look like."""
NOTES = frozenset({"title", "description", "$comment", "default", "examples", "deprecated", "readOnly", "writeOnly"})
"""Keywords that do not affect validity."""
_REASONING = {Thinking.NONE: "", Thinking.OPTIONAL: "(opening reasoning)? ", Thinking.BEGUN: "reasoning "}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One of several grammars that can refer to each other."""

    field: str
    grammar: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    rules: Sequence[str]
    """Lark rules. The rules named in ``starts`` are alternatives."""
    starts: Sequence[str]
    parts: Mapping[str, Part]

    def grammar(self, thinking: Thinking, whole_texts: frozenset[str]) -> str:
        """Return the complete grammar: reasoning, then the answer. Markers in ``whole_texts`` are single tokens."""
        start = f"start: {_REASONING[thinking]}({' | '.join(self.starts)})"
        lark = "\n".join([start, *self.rules, *_reasoning_rules(thinking, whole_texts)])
        named = [{"name": name, **part.grammar} for name, part in self.parts.items()]
        return _grammar_text({"lark_grammar": lark}, *named)


def json_part(schema: Mapping[str, Any] | bool, field: str) -> Part:
    """Return a JSON schema's grammar. The schema's ``x-guidance`` can set further options of llguidance."""
    if schema is False:
        return Part(field=field, grammar={"json_schema": False})
    given = {} if schema is True else without_noops(schema)
    options = {"whitespace_pattern": _WHITE_SPACE}
    own = given.get("x-guidance", {})
    if isinstance(own, dict):
        own = own if "whitespace_flexible" in own or "whitespace_pattern" in own else options | own
    return Part(field=field, grammar={"json_schema": given | {"x-guidance": own}})


def wanted_answer(body: GenerationBody) -> Constraint | None:
    """Return the required form of the answer, or None if any form is allowed."""
    if not body.is_constrained:
        return None
    outputs = body.structured_outputs
    given = {name: getattr(body, name) for name in FORM_FIELDS}
    if outputs is not None:
        others = _in_outputs(outputs.others)
        refuse_unsupported(others, dict.fromkeys(others, (False,)))
        given |= _in_outputs(outputs.forms)
    parts = [_part(field, value) for field, value in given.items() if value is not None]
    parts += _formatted(body)
    if len(parts) > 1:
        fields = " and ".join(part.field for part in parts)
        raise bad_request(f"{parts[1].field}: only one of these constraints may be given: {fields}", parts[1].field)
    return Constraint(rules=(), starts=("@answer",), parts={"answer": parts[0]}) if parts else None


def grammar_of(model: ServedModel, wanted: Callable[[], Constraint | None], thinking: Thinking = Thinking.NONE) -> str:
    """Return the grammar of an answer as text for the replicas; empty if any answer is allowed.

    Args:
        wanted: function that converts the client's fields.

    Raises:
        ApiError: the grammar is invalid or too long.
    """
    with model.grammars.limited() if model.grammars is not None else nullcontext():
        constraint = wanted()
        return "" if constraint is None else _checked(model, constraint, thinking)


def _checked(model: ServedModel, constraint: Constraint, thinking: Thinking) -> str:
    grammar = constraint.grammar(thinking, model.tokenizer.whole_texts)
    if len(grammar) > MAX_GRAMMAR_CHARS:
        field = next(iter(constraint.parts.values())).field
        got = f"got {len(grammar)} characters of grammar"
        raise bad_request(f"{field}: {got}; allowed: at most {MAX_GRAMMAR_CHARS}", field)
    # Compiling a grammar with reasoning does not reveal that no answer can follow the reasoning.
    bare = constraint.grammar(Thinking.NONE, model.tokenizer.whole_texts)
    for asked in dict.fromkeys((bare, grammar)):
        if problem := _problem(model, asked):
            raise _blame(model, constraint, problem)
    return grammar


def _blame(model: ServedModel, constraint: Constraint, problem: str) -> ApiError:
    """Return an error about the part that is invalid on its own, or otherwise about all parts together."""
    for part in constraint.parts.values():
        if own := _problem(model, _grammar_text(part.grammar)):
            return bad_request(f"{part.field}: {own}", part.field)
    field = next(iter(constraint.parts.values())).field
    return bad_request(f"{field}: {problem}", field)


def _problem(model: ServedModel, grammar: str) -> str:
    assert model.grammars is not None
    try:
        model.grammars.prepare(grammar).result()
    except UserError as error:
        return str(error)
    return ""


def _in_outputs(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {f"structured_outputs.{name}": value for name, value in fields.items()}


def _part(field: str, value: Any) -> Part:
    kind = field.removeprefix("structured_outputs.").removeprefix("guided_")
    match kind:
        case "json" | "json_schema":
            return json_part(_schema(value, field), field)
        case "json_object":
            return json_part(ANY_OBJECT, field)
        case "regex":
            lark = lark_of_regex(value)
        case "choice":
            # A terminal (in capitals) is one automaton, whereas a rule's alternatives are tracked one by one.
            choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in value)
            lark = f"start: CHOICE\nCHOICE: {choices}"
        case "grammar" | "ebnf":
            try:
                lark = lark_of(value)
            except UserError as error:
                raise bad_request(f"{field}: {error}", field) from error
        case _:
            raise AssertionError(kind)
    return Part(field=field, grammar={"lark_grammar": lark})


def _formatted(body: GenerationBody) -> list[Part]:
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return []
    if wanted.type == "json_object":
        return [json_part(ANY_OBJECT, "response_format")]
    named = wanted.json_schema
    if named is None or named.schema_ is None:
        field = "response_format.json_schema" if named is None else "response_format.json_schema.schema"
        raise bad_request(f'{field}: field required when type is "json_schema"', field)
    return [json_part(named.schema_, "response_format.json_schema.schema")]


def _schema(given: Any, field: str) -> Mapping[str, Any] | bool:
    if isinstance(given, str):
        try:
            given = from_json(given)  # json.loads has no error for deep nesting
        except ValueError as error:
            raise bad_request(f"{field}: not valid JSON: {error}", field) from error
    if not isinstance(given, dict | bool):
        raise bad_request(f"{field}: must be a JSON schema, as an object or as text", field)
    return given


def _grammar_text(*grammars: Mapping[str, Any]) -> str:
    """Serialize grammars. The generated text must match the first one."""
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def _reasoning_rules(thinking: Thinking, whole_texts: frozenset[str]) -> list[str]:
    if thinking is Thinking.NONE:
        return []
    opening = OPENING if OPENING in whole_texts else json.dumps(OPENING)
    if CLOSING in whole_texts:
        reasoning = [f"reasoning: /(?s:.*)/ {CLOSING} /\\n{{0,2}}/"]
    else:
        reasoning = ["reasoning: reasoning_text /\\n{0,2}/", f"reasoning_text[suffix={json.dumps(CLOSING)}]: /(?s:.*)/"]
    return [f"opening: {opening}", *reasoning]


def without_noops(schema: Any) -> Any:
    """Return a schema without the keywords that allow everything and the string formats that are not enforced."""
    if not isinstance(schema, dict):
        return schema
    inner = {keyword: _cleaned(keyword, value) for keyword, value in schema.items()}
    return {keyword: value for keyword, value in inner.items() if not _forbids_nothing(keyword, value)}


def _cleaned(keyword: str, value: Any) -> Any:
    if keyword in _HOLDING_NAMED and isinstance(value, dict):
        return {name: without_noops(named) for name, named in value.items()}
    if keyword in _HOLDING:
        return [without_noops(listed) for listed in value] if isinstance(value, list) else without_noops(value)
    return value


def _forbids_nothing(keyword: str, value: Any) -> bool:
    """Return whether a keyword with this value forbids nothing. llguidance would reject it rather than ignore it."""
    match keyword:
        case "format":
            return isinstance(value, str) and not knows_format(value)
        case "uniqueItems":
            return value is False
        case "propertyNames" if isinstance(value, dict):
            return {name: value[name] for name in value.keys() - NOTES} in ({}, {"type": "string"})
    return False
