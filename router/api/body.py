"""Reads a request's body into one of the schemas, or says what is wrong with it."""

from http import HTTPStatus
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import ClientDisconnect, Request

from router.api.errors import ApiError, bad_request
from router.api.requests import EXPECTED

Body = TypeVar("Body", bound=BaseModel)


async def read(request: Request, schema: type[Body]) -> Body:
    """The body of a request.

    Raises:
        ApiError: 413 when it is too large, 400 naming the first field that is wrong.
        ClientDisconnect: it did not come whole.
    """
    limit: int = request.app.state.max_body_bytes
    received = bytearray()
    has_more = True
    while has_more:
        event = await request.receive()
        if event["type"] == "http.disconnect":
            raise ClientDisconnect
        has_more = event.get("more_body", False)
        received += event.get("body", b"")
        if len(received) > limit:
            message = f"the body is larger than {limit} bytes (router.max_body_mib)"
            raise ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, code="body_too_large")
    try:
        return schema.model_validate_json(bytes(received))
    except ValidationError as error:
        raise problem_of(error.errors(include_url=False)[0]) from None


def problem_of(error: ErrorDetails) -> ApiError:
    """A validation error of pydantic's in our words, naming the field."""
    if error["type"] == "json_invalid":
        return bad_request(f"body: {error['msg']}")
    path, field = _path(error["loc"])
    if not path:
        return bad_request(f"body: must be a JSON object, got {_short(error['input'])}")
    if error["type"] == "missing":
        return bad_request(f"{path}: field required", path)
    if field in EXPECTED:
        return bad_request(f"{path}: must be {EXPECTED[field]}", path)
    return bad_request(f"{path}: {error['msg']}, got {_short(error['input'])}", path)


def _path(loc: tuple[int | str, ...]) -> tuple[str, str]:
    """The dotted path of a field and its last name; what the schema adds to tell types apart is left out."""
    path, field = "", ""
    for step in loc:
        if isinstance(step, int):
            path += f"[{step}]"
            continue
        if step == "[key]":
            continue
        path += f".{step}" if path else step
        field = step
        if field in EXPECTED:
            break
    return path, field


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
