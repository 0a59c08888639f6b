"""``/v1/responses``: OpenAI's newer way to ask for what chat completions give; nothing is stored."""

from collections.abc import AsyncGenerator
from dataclasses import replace

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from router.answer import Answer
from router.api.body import document, read
from router.api.chat import chat_ask
from router.api.connection import EventStream, unless_client_leaves
from router.api.errors import ApiError
from router.api.generate import Work, collect, opened, pieces_of, texts_of, usage_of
from router.api.keys import caller_of, priority_of
from router.api.request_id import request_id
from router.api.response_request import ResponseRequest
from router.api.response_writer import ResponseWriter
from router.api.sampling import text_rules
from router.api.session import session_of
from router.errors import RequestFailedError
from router.service import Service
from router.text import Piece, join


def routes(service: Service) -> APIRouter:
    """The route that creates responses."""
    router = APIRouter(tags=["generation"])

    @router.post("/v1/responses", openapi_extra=document(ResponseRequest))
    async def create_response(request: Request) -> Response:
        """Answer a text or a conversation."""
        arrived_s = service.relay.now_s()
        body = await read(request, ResponseRequest)
        work = await _work(service, request, body, arrived_s)
        writer = ResponseWriter(request_id(request), service, body)
        if body.stream:
            return EventStream(
                open_answer=lambda: opened(service, work),
                frames=lambda answer: _frames(service, answer, work, writer),
                config=service.config.router,
            )
        choices, usage, headers = await unless_client_leaves(request.receive, collect(service, work))
        return Response(writer.whole(choices[0], usage), headers=headers, media_type="application/json")

    return router


async def _work(service: Service, request: Request, body: ResponseRequest, arrived_s: float) -> Work:
    chat = body.as_chat()
    try:
        ask, _ = await chat_ask(service, chat)
    except ApiError as error:
        raise _in_words_of_responses(error) from None
    session = session_of(request, {"user": body.user} | body.others)
    ask = replace(ask, session=session, priority=priority_of(request, chat.priority))
    rules = text_rules(service, chat)
    return Work(caller=caller_of(request), asks=[ask], num_choices=1, rules=rules, arrived_s=arrived_s)


def _in_words_of_responses(error: ApiError) -> ApiError:
    """The same, about the field that this API has in the place of chat's."""
    names = {"messages": "input", "max_tokens": "max_output_tokens"}
    if error.param not in names:
        return error
    name = names[error.param]
    message = str(error).replace(f"{error.param}:", f"{name}:", 1)
    return ApiError(error.status, message, name, error.code, error.headers)


async def _frames(service: Service, answer: Answer, work: Work, writer: ResponseWriter) -> AsyncGenerator[bytes, None]:
    """The events; the first ones come with the first token, so that a failure before it shows as a status."""
    said: list[Piece] = []
    try:
        async for pieces in pieces_of(answer, texts_of(service, work)):
            events = writer.opening() if pieces and not said else b""
            said += [piece for _, piece in pieces]
            yield events + b"".join(writer.delta(piece) for _, piece in pieces if piece.text or piece.logprobs)
    except RequestFailedError as error:
        if not said:
            raise
        yield writer.failed(error.cause.value, str(error))
        return
    whole = join(said)
    yield writer.closing(whole, usage_of(work, answer, len(whole.token_ids)))
