"""The OpenAPI document's part about bodies that routes read and write themselves."""

from typing import Any

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from router.errors import ErrorBody

_REF = "#/components/schemas/{name}"
_bodies: dict[str, type[BaseModel]] = {}
_answers: dict[str, type[msgspec.Struct]] = {ErrorBody.__name__: ErrorBody}
"""Schemas by name; every route with ``document`` adds its own."""


def document(body: type[BaseModel], *answers: type[msgspec.Struct]) -> dict[str, Any]:
    """Return ``openapi_extra`` of a route with this body and this answer: the first whole, a further one a stream's."""
    _bodies[body.__name__] = body
    _answers.update({answer.__name__: answer for answer in answers})
    extra: dict[str, Any] = {"requestBody": {"required": True, "content": _json(body)}}
    if answers:
        content = _json(answers[0]) | {"text/event-stream": {}}
        description = "The answer; as server-sent events where `stream` is true."
        extra["responses"] = {"200": {"description": description, "content": content}}
    return extra


def complete(document: dict[str, Any]) -> dict[str, Any]:
    """Add the schemas that ``document`` refers to, and the form of errors, to an application's document."""
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    ref_template = _REF.format(name="{model}")
    _, of_bodies = models_json_schema([(body, "validation") for body in _bodies.values()], ref_template=ref_template)
    _, of_answers = msgspec.json.schema_components(_answers.values(), ref_template=_REF)
    assert of_answers.keys().isdisjoint(of_bodies["$defs"]), "two schemas of one name"
    schemas |= of_bodies["$defs"] | of_answers
    failed = {"description": "Why there is no answer.", "content": _json(ErrorBody)}
    for path in document["paths"].values():
        for operation in path.values():
            # No route answers with the error of parameters that FastAPI checks itself.
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = failed
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    return document


def _json(schema: type) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(name=schema.__name__)}}}
