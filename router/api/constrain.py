"""Conversion of body fields to the grammar of the answer."""

import asyncio
from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

from cluster.grammar import lark_of
from cluster.spec.errors import UserError
from router.api.errors import bad_request
from router.api.requests import GenerationBody
from router.api.unsupported import refuse_unsupported
from router.constraints import (
    ANY_OBJECT,
    Constraint,
    Part,
    answer_of,
    choice_part,
    grammar_text,
    json_part,
    lark_part,
    regex_part,
)
from router.reasoning import Thinking
from router.service import Service

MAX_GRAMMAR_CHARS = 1024 * 1024
"""Longest grammar; it is sent with the request."""


def wanted_answer(body: GenerationBody) -> Constraint | None:
    """Return the required form of the answer's text; None for none."""
    if not body.wants_form:
        return None
    outputs = body.structured_outputs
    given = {
        "guided_json": body.guided_json,
        "guided_regex": body.guided_regex,
        "guided_choice": body.guided_choice,
        "guided_grammar": body.guided_grammar,
        "json_schema": body.json_schema,
        "regex": body.regex,
        "ebnf": body.ebnf,
    }
    if outputs is not None:
        others = _in_outputs(outputs.model_extra or {})
        refuse_unsupported(others, dict.fromkeys(others, (False,)))
        given |= _in_outputs(outputs.forms)
    parts = [_part(field, value) for field, value in given.items() if value is not None]
    parts += _formatted(body)
    if len(parts) > 1:
        fields = " and ".join(part.field for part in parts)
        raise bad_request(f"{parts[1].field}: the answer can have only one form, got {fields}", parts[1].field)
    return answer_of(parts[0]) if parts else None


async def checked_grammar(service: Service, constraint: Constraint | None, thinking: Thinking = Thinking.NONE) -> str:
    """Return the grammar for the replicas; empty for none."""
    if constraint is None:
        return ""
    grammar = constraint.grammar(thinking, service.tokenizer.special_texts)
    if len(grammar) > MAX_GRAMMAR_CHARS:
        field = next(iter(constraint.parts.values())).field
        raise bad_request(f"{field}: more than {MAX_GRAMMAR_CHARS} characters of grammar, got {len(grammar)}", field)
    # Thoughts before it would hide that nothing can follow.
    bare = constraint.grammar(Thinking.NONE, service.tokenizer.special_texts)
    for asked in dict.fromkeys((bare, grammar)):
        if problem := await _problem(service, asked):
            raise await _blame(service, constraint, problem)
    return grammar


async def _blame(service: Service, constraint: Constraint, problem: str) -> Exception:
    """Return an error about the part that cannot be used even alone, else about all of them."""
    for part in constraint.parts.values():
        if own := await _problem(service, grammar_text(part.grammar)):
            return bad_request(f"{part.field}: {own}", part.field)
    field = next(iter(constraint.parts.values())).field
    return bad_request(f"{field}: {problem}", field)


async def _problem(service: Service, grammar: str) -> str:
    """Return why a grammar cannot be used; empty if it can."""
    try:
        # Shielded: other requests may wait for the same one.
        await asyncio.shield(asyncio.wrap_future(service.grammars.prepare(grammar)))
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
            return regex_part(value, field)
        case "choice":
            return choice_part(value, field)
    assert kind in ("grammar", "ebnf"), f"no such form: {kind}"
    try:
        return lark_part(lark_of(value), field)
    except UserError as error:
        raise bad_request(f"{field}: {error}", field) from error


def _formatted(body: GenerationBody) -> list[Part]:
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return []
    if wanted.type == "json_object":
        return [json_part(ANY_OBJECT, "response_format")]
    named = wanted.json_schema
    if named is None or named.schema_ is None:
        field = "response_format.json_schema" if named is None else "response_format.json_schema.schema"
        raise bad_request(f'{field}: field required where type is "json_schema"', field)
    return [json_part(named.schema_, "response_format.json_schema.schema")]


def _schema(given: Any, field: str) -> Mapping[str, Any] | bool:
    if isinstance(given, str):
        try:
            given = from_json(given)  # json.loads has no error for deep nesting
        except ValueError as error:
            raise bad_request(f"{field}: not valid JSON: {error}", field) from error
    if not isinstance(given, dict | bool):
        raise bad_request(f"{field}: must be a JSON schema: an object, or its text", field)
    return given
