"""The id of a request: the client's ``X-Request-Id`` where it is sound, else a fresh one; always in the response."""

import re
import secrets
from collections.abc import Awaitable

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.api.headers import header

REQUEST_ID = "x-request-id"
_HEADER = REQUEST_ID.encode()
_SOUND = re.compile(r"[\x21-\x7e]{1,128}")
_KEY = "baton.request_id"


class RequestIds:
    """ASGI middleware that gives every request its id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and add the header to what comes back."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = header(scope, _HEADER) or ""
        chosen = given if _SOUND.fullmatch(given) else secrets.token_hex(16)
        scope[_KEY] = chosen

        # Plain, not async: it is called for every token.
        def send_with_id(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (_HEADER, chosen.encode())]
            return send(message)

        await self._app(scope, receive, send_with_id)


def request_id(request: Request) -> str:
    """The id of a request that came through the middleware."""
    chosen: str = request.scope[_KEY]
    return chosen
