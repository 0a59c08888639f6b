"""Calls the handlers of the busiest routes without what FastAPI does around each, which takes longer than they do."""

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.api.errors import EXPECTED_ERRORS, answer_error
from router.api.keys import check_key
from router.service import Service

Handler = Callable[[Request], Awaitable[Response]]


class Direct:
    """ASGI application: these handlers for POST to their paths, another application for everything else."""

    def __init__(self, app: ASGIApp, handlers: Mapping[str, Handler], service: Service) -> None:
        self._app = app
        self._handlers = handlers
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        handler = self._handlers.get(scope["path"]) if is_post else None
        if handler is None:
            await self._app(scope, receive, send)
            return
        has_begun = False

        # Plain, not async: it is called for every token.
        def send_noting(message: Message) -> Awaitable[None]:
            nonlocal has_begun
            has_begun = True
            return send(message)

        scope["app"] = self._app
        request = Request(scope, receive)
        try:
            check_key(self._service, request)
            response = await handler(request)
            await response(scope, receive, send_noting)
        except Exception as error:
            if not has_begun:
                await answer_error(self._service.metrics, request, error)(scope, receive, send)
            if has_begun or not isinstance(error, EXPECTED_ERRORS):
                raise  # for the log
