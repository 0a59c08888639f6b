"""The OpenAPI document's part about bodies that routes read and write for themselves."""

from typing import Any

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from router.api.errors import ErrorBody
from router.api.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    PinRequest,
    TargetRequest,
    TokenizeRequest,
)
from router.api.response_objects import ResponseObject
from router.api.response_request import ResponseRequest
from router.api.responses import ChatChunk, ChatCompletion, Completion

_BODIES = (
    CompletionRequest,
    ChatRequest,
    ResponseRequest,
    TokenizeRequest,
    DetokenizeRequest,
    PinRequest,
    TargetRequest,
)
_ANSWERS = (Completion, ChatCompletion, ChatChunk, ResponseObject, ErrorBody)
_REF = "#/components/schemas/{name}"


def document(body: type[BaseModel], answer: type[msgspec.Struct] | None = None) -> dict[str, Any]:
    """Return ``openapi_extra`` of a route with this body and this answer, whole or as a stream."""
    extra: dict[str, Any] = {"requestBody": {"required": True, "content": _json(body)}}
    if answer is not None:
        content = _json(answer) | {"text/event-stream": {}}
        description = "The answer; as server-sent events where `stream` is true."
        extra["responses"] = {"200": {"description": description, "content": content}}
    return extra


def complete(document: dict[str, Any]) -> dict[str, Any]:
    """Add the schemas that ``document`` refers to, and the form of errors, to an application's document."""
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    _, of_bodies = models_json_schema(
        [(body, "validation") for body in _BODIES], ref_template=_REF.format(name="{model}")
    )
    _, of_answers = msgspec.json.schema_components(_ANSWERS, ref_template=_REF)
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
