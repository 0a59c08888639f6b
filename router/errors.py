"""Errors in the form of OpenAI's API: ``{"error": {"message", "type", "param", "code"}}``."""

from collections.abc import Mapping
from http import HTTPStatus

import msgspec

from router.request import Cause

_CLIENT_CLOSED_REQUEST = 499
_STATUS_OF = {
    Cause.REFUSED: HTTPStatus.BAD_REQUEST,
    Cause.TIMED_OUT: HTTPStatus.GATEWAY_TIMEOUT,
    Cause.CORRUPTED: HTTPStatus.INTERNAL_SERVER_ERROR,
    Cause.BROKEN_OUTPUT: HTTPStatus.INTERNAL_SERVER_ERROR,
}
"""HTTP status by cause; all other causes get 503."""
_TEMPORARY = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)


class ErrorObject(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    error: ErrorObject


class ApiError(Exception):
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
        self.headers = ({"retry-after": "1"} if status in _TEMPORARY else {}) | dict(headers or {})

    @property
    def body(self) -> bytes:
        error = ErrorObject(message=str(self), type=_kind(self.status), param=self.param, code=self.code)
        return msgspec.json.encode(ErrorBody(error=error))


class NotReadyError(ApiError):
    """The router cannot accept requests now; the message says why."""

    def __init__(self, message: str) -> None:
        super().__init__(HTTPStatus.SERVICE_UNAVAILABLE, message, code="not_ready")


class LimitError(ApiError):
    def __init__(self, message: str, code: str, limit: str, retry_after_s: int = 1) -> None:
        """Create the error; ``limit`` is the name of the setting, or empty if the replicas' capacity is the limit."""
        super().__init__(HTTPStatus.TOO_MANY_REQUESTS, message, code=code, headers={"retry-after": str(retry_after_s)})
        self.limit = limit


class QueueFullError(LimitError):
    """The router cannot accept a request until others end; the message names the limit reached."""

    def __init__(self, message: str, limit: str = "") -> None:
        super().__init__(message, "queue_full", limit)


class KeyLimitError(LimitError):
    def __init__(self, message: str, limit: str, retry_after_s: int = 1) -> None:
        super().__init__(message, "rate_limit_exceeded", limit, retry_after_s)


class ClientLeftError(ApiError):
    """The client closed its connection before the answer was complete."""

    def __init__(self) -> None:
        super().__init__(_CLIENT_CLOSED_REQUEST, "client left", code="client_left")


class RequestFailedError(ApiError):
    """An accepted request ended without a complete answer."""

    def __init__(self, cause: Cause, reason: str) -> None:
        super().__init__(_STATUS_OF.get(cause, HTTPStatus.SERVICE_UNAVAILABLE), reason, code=cause.value)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(HTTPStatus.BAD_REQUEST, message, param, code)


def internal_error() -> ApiError:
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error; see the router's log")


def refused(message: str) -> ApiError:
    """Return the error for an admin command that the router or a replica cannot carry out."""
    return ApiError(HTTPStatus.CONFLICT, message, code="refused")


def _kind(status: int) -> str:
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return "rate_limit_error"
    return "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
