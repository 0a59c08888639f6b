"""Refusals of requests before an application sees them."""

from http import HTTPStatus

import httptools

MAX_HEAD_BYTES = 64 << 10
"""Maximum size of a request head, of a chunked body's trailers, and of what precedes a chunk."""
REFUSAL_KEY = "baton.refusal"
"""Key of an ASGI scope whose request was refused while its body arrived; the application sees a disconnect."""


class Refusal(Exception):  # noqa: N818
    """Answer to a request that its connection refuses."""

    def __init__(self, status: HTTPStatus, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def invalid(why: str) -> Refusal:
    return Refusal(HTTPStatus.BAD_REQUEST, "bad_request", f"the request is not valid: {why}")


def too_large(what: str) -> Refusal:
    message = f"{what} larger than {MAX_HEAD_BYTES} bytes"
    return Refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "head_too_large", message)


def too_slow(what: str, limit_s: float) -> Refusal:
    message = f"the request {what} did not arrive within {limit_s:g} s"
    return Refusal(HTTPStatus.REQUEST_TIMEOUT, f"{what}_timeout", message)


def wrong_version(version: str) -> Refusal:
    return invalid(f"HTTP/{version} is not supported, use HTTP/1.1")


def refusal_of(error: httptools.HttpParserError, data: bytes) -> Refusal:
    """Return the refusal of data at which the parser has failed, or which a callback has refused."""
    known = error.__context__
    if isinstance(known, Refusal):
        return known
    if data.startswith(b"PRI * HTTP/2.0"):
        return wrong_version("2.0")
    return invalid("invalid URL" if isinstance(error, httptools.HttpParserCallbackError) else str(error))
