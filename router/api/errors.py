"""Responses to errors of all kinds."""

from http import HTTPStatus

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from router.connection import answer_of
from router.errors import ApiError, ClientLeftError, LimitError, internal_error
from router.metrics import Metrics
from router.preprocess.body import shortened

EXPECTED_ERRORS = (ApiError, ClientDisconnect)
"""Errors that are not bugs of the router."""


def answer_error(metrics: Metrics, request: Request, error: Exception) -> Response:
    """Count an error and return the response for it."""
    match error:
        case ApiError():
            shown = error
        case ClientDisconnect():
            shown = ClientLeftError()
        case HTTPException():
            shown = _http_error(request, error)
        case _:
            shown = internal_error()
    metrics.refused.add(1, str(int(shown.status)))
    if isinstance(error, LimitError):
        metrics.rejections.add(1, error.limit)
    return answer_of(shown)


def install(app: FastAPI, metrics: Metrics) -> None:
    async def answer(request: Request, error: Exception) -> Response:
        return answer_error(metrics, request, error)

    for kind in (*EXPECTED_ERRORS, HTTPException, Exception):
        app.add_exception_handler(kind, answer)


def _http_error(request: Request, error: HTTPException) -> ApiError:
    path = shortened(request.url.path)
    messages = {
        HTTPStatus.NOT_FOUND: f"there is no route {path}",
        HTTPStatus.METHOD_NOT_ALLOWED: f"{path} does not accept {request.method}",
    }
    headers = dict(error.headers or {})
    if headers.get("Allow") == "GET":  # HEAD is answered like GET
        headers["Allow"] = "GET, HEAD"
    status = HTTPStatus(error.status_code)
    message = messages.get(status, str(error.detail))
    return ApiError(status, message, code=status.name.lower(), headers=headers)
