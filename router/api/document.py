"""OpenAPI documentation of the bodies that FastAPI does not parse or write itself."""

from typing import Any

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from router.errors import ErrorBody

_REF = "#/components/schemas/{name}"
_bodies: dict[str, type[BaseModel]] = {}
_answers: dict[str, type[msgspec.Struct]] = {ErrorBody.__name__: ErrorBody}
"""Response schemas by name. Each call of ``document`` adds its own."""


def document(body: type[BaseModel], *answers: type[msgspec.Struct]) -> dict[str, Any]:
    """Return a route's ``openapi_extra``. The first of ``answers`` is the JSON response; others only add schemas."""
    _bodies[body.__name__] = body
    _answers.update({answer.__name__: answer for answer in answers})
    extra: dict[str, Any] = {"requestBody": {"required": True, "content": _json(body)}}
    if answers:
        content = _json(answers[0]) | {"text/event-stream": {}}
        description = "The answer, sent as server-sent events if `stream` is true."
        extra["responses"] = {"200": {"description": description, "content": content}}
    return extra


def complete(document: dict[str, Any]) -> dict[str, Any]:
    """Add the error schema, and the schemas collected by ``document`` calls, to an application's OpenAPI document."""
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    ref_template = _REF.format(name="{model}")
    _, bodies = models_json_schema([(body, "validation") for body in _bodies.values()], ref_template=ref_template)
    _, answers = msgspec.json.schema_components(_answers.values(), ref_template=_REF)
    assert answers.keys().isdisjoint(bodies["$defs"]), "two schemas have the same name"
    schemas |= bodies["$defs"] | answers
    failed = {"description": "Reason why the request failed.", "content": _json(ErrorBody)}
    for path in document["paths"].values():
        for operation in path.values():
            # No route has parameters that FastAPI validates, so FastAPI's error schema is unused.
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = failed
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    return document


def _json(schema: type) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(name=schema.__name__)}}}
