"""Errors in the form of OpenAI's API: ``{"error": {"message", "type", "param", "code"}}``."""

from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from router.errors import (
    ClientLeftError,
    KeyLimitError,
    LimitError,
    NoAnswerError,
    NotReadyError,
    QueueFullError,
    RefusedError,
    RequestFailedError,
)
from router.metrics import Metrics
from router.request import Cause

_CLIENT_CLOSED_REQUEST = 499
_STATUS = {
    Cause.REFUSED: HTTPStatus.BAD_REQUEST,
    Cause.REPLICA_FAILED: HTTPStatus.SERVICE_UNAVAILABLE,
    Cause.REPLICA_LOST: HTTPStatus.SERVICE_UNAVAILABLE,
    Cause.NO_REPLICA: HTTPStatus.SERVICE_UNAVAILABLE,
    Cause.TIMED_OUT: HTTPStatus.GATEWAY_TIMEOUT,
    Cause.STOPPED: HTTPStatus.SERVICE_UNAVAILABLE,
    Cause.BROKEN_OUTPUT: HTTPStatus.INTERNAL_SERVER_ERROR,
}


_ANSWERS: Mapping[type[Exception], tuple[HTTPStatus, str]] = {
    NotReadyError: (HTTPStatus.SERVICE_UNAVAILABLE, "not_ready"),
    QueueFullError: (HTTPStatus.TOO_MANY_REQUESTS, "queue_full"),
    KeyLimitError: (HTTPStatus.TOO_MANY_REQUESTS, "rate_limit_exceeded"),
    NoAnswerError: (HTTPStatus.GATEWAY_TIMEOUT, "no_answer"),
    RefusedError: (HTTPStatus.CONFLICT, "refused"),
}
"""Status and code of errors other than a request's own."""


class ErrorObject(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every error."""

    error: ErrorObject


class ApiError(Exception):
    """A request that is answered with an error; whatever reads or converts a body may raise it."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> bytes:
        error = ErrorObject(message=str(self), type=_kind(self.status), param=self.param, code=self.code)
        return msgspec.json.encode(ErrorBody(error=error))


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(HTTPStatus.BAD_REQUEST, message, param, code)


def failed(error: RequestFailedError) -> ApiError:
    status = _STATUS[error.cause]
    return ApiError(status, str(error), code=error.cause.value, headers=_retry(status))


EXPECTED_ERRORS = (ApiError, RequestFailedError, ClientLeftError, ClientDisconnect, *_ANSWERS)
"""All others are our bugs."""


def answer_error(metrics: Metrics, request: Request, error: Exception) -> Response:
    """Return the response to a request that raised this, and count it."""
    shaped = _shape(request, error)
    metrics.refused.add(1, str(int(shaped.status)))
    if isinstance(error, LimitError):
        metrics.rejections.add(1, error.limit)
    return Response(shaped.body, shaped.status, shaped.headers, media_type="application/json")


def install(app: FastAPI, metrics: Metrics) -> None:
    """Answer every error of this application in this form, and count it."""

    async def answer(request: Request, error: Exception) -> Response:
        return answer_error(metrics, request, error)

    for kind in (*EXPECTED_ERRORS, HTTPException, Exception):
        app.add_exception_handler(kind, answer)


def _shape(request: Request, error: Exception) -> ApiError:
    match error:
        case ApiError():
            return error
        case RequestFailedError():
            return failed(error)
        case ClientLeftError() | ClientDisconnect():
            return ApiError(_CLIENT_CLOSED_REQUEST, "client left", code="client_left")
        case KeyLimitError() | NotReadyError() | QueueFullError() | NoAnswerError() | RefusedError():
            status, code = _ANSWERS[type(error)]
            return ApiError(status, str(error), code=code, headers=_retry(status, getattr(error, "retry_after_s", 1)))
        case HTTPException():
            return _http_error(request, error)
        case _:
            return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error; the router's log says more")


def _retry(status: HTTPStatus, after_s: int = 1) -> dict[str, str]:
    is_temporary = status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
    return {"retry-after": str(after_s)} if is_temporary else {}


def _kind(status: int) -> str:
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return "rate_limit_error"
    return "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"


def _http_error(request: Request, error: HTTPException) -> ApiError:
    messages = {
        HTTPStatus.NOT_FOUND: f"there is no route {request.url.path}",
        HTTPStatus.METHOD_NOT_ALLOWED: f"{request.url.path} does not take {request.method}",
    }
    status = HTTPStatus(error.status_code)
    message = messages.get(status, str(error.detail))
    return ApiError(status, message, code=status.name.lower(), headers=error.headers)
