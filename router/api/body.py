"""Reads a request's body into one of the schemas, or says what is wrong with it."""

from collections.abc import Mapping
from contextlib import suppress
from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from router.api import requests
from router.api.errors import ApiError, bad_request
from router.api.long_ids import cut_ids
from router.api.requests import EXPECTED
from router.api.unsupported import refuse_unsupported

Body = TypeVar("Body", bound=requests.Body)

_WORDS = {
    "extra_forbidden": "there is no such field",
    "too_short": "items needed: at least {min_length}",
    "too_long": "items allowed: at most {max_length}",
}
"""Instead of pydantic's words, by its type of error."""


async def read(request: Request, schema: type[Body]) -> Body:
    """The body of a request.

    Raises:
        ApiError: 400 naming the first field that is wrong, or as of ``ArrivingBodies``.
        ClientDisconnect: it did not come whole.
    """
    return parse(await request.app.state.bodies.receive(request), schema)


def parse(content: bytes, schema: type[Body]) -> Body:
    """What the bytes of a body say.

    Raises:
        ApiError: 400 naming the first field that is wrong.
    """
    if (body := _read_cut(content, schema)) is not None:
        return body
    try:
        return schema.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] == "missing" and len(first["loc"]) == 1:
            # It may be there by the name that others have for it.
            refuse_unsupported(
                {name: value for name, value in first["input"].items() if name not in schema.model_fields}
            )
        raise problem_of(first, schema.expected) from None


def _read_cut(content: bytes, schema: type[Body]) -> Body | None:
    """The body, if it has token ids that need not be numbers, and nothing is wrong with it."""
    field = schema.ids_field
    if field is None or (cut := cut_ids(content, field)) is None:
        return None
    rest, ids = cut
    with suppress(ValidationError):
        body = schema.model_validate_json(rest, context=ids)
        return body if getattr(body, field) is ids else None
    return None


def problem_of(error: ErrorDetails, expected: Mapping[str, str] = EXPECTED) -> ApiError:
    """A validation error of pydantic's in our words, naming the field; ``expected`` is its schema's."""
    if error["type"] == "json_invalid":
        return bad_request(f"body: {error['msg']}")
    path, field = _path(error["loc"], expected)
    if not path:
        return bad_request(f"body: must be a JSON object, got {_short(error['input'])}")
    if error["type"] == "missing":
        return bad_request(f"{path}: field required", path)
    if field in expected:
        return bad_request(f"{path}: must be {expected[field]}", path)
    words = _WORDS.get(error["type"])
    said = error["msg"] if words is None else words.format(**error.get("ctx", {}))
    return bad_request(f"{path}: {said}, got {_short(error['input'])}", path)


def _path(loc: tuple[int | str, ...], expected: Mapping[str, str]) -> tuple[str, str]:
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
        if field in expected:
            break
    return path, field


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
