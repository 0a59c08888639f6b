"""``/v1/responses``: OpenAI's newer way to ask for what chat completions give; nothing is stored."""

from collections.abc import AsyncGenerator

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from router.answer import Answer
from router.api.body import read
from router.api.chat import chat_ask, markers
from router.api.connection import EventStream, JsonAnswer, unless_client_leaves
from router.api.document import document
from router.api.dp_rank import dp_rank_of
from router.api.errors import ApiError
from router.api.generate import Pieces, Work, opened, texts_of, usage_of
from router.api.headers import header
from router.api.keys import caller_of, priority_of
from router.api.request_id import request_id
from router.api.response_chat import chat_of, in_own_words
from router.api.response_objects import ResponseObject
from router.api.response_request import ResponseRequest
from router.api.response_writer import ResponseWriter
from router.api.sampling import text_rules
from router.api.session import session_of
from router.errors import RequestFailedError
from router.message import NewReader
from router.service import Service
from router.tracing import TRACEPARENT


def routes(service: Service) -> APIRouter:
    """The route that creates responses."""
    router = APIRouter(tags=["generation"])

    @router.post("/v1/responses", openapi_extra=document(ResponseRequest, ResponseObject))
    async def create_response(request: Request) -> Response:
        """Answer a text or a conversation."""
        arrived_s = service.relay.now_s()
        body = await read(request, ResponseRequest)
        work, new_reader = await _work(service, request, body, arrived_s)
        writer = ResponseWriter(request_id(request), service, body, new_reader())
        if body.stream:
            return EventStream(
                open_answer=lambda: opened(service, work),
                frames=lambda answer: _frames(service, answer, work, writer),
                config=service.config.router,
            )
        return await unless_client_leaves(request.receive, _whole(service, work, writer))

    return router


async def _work(service: Service, request: Request, body: ResponseRequest, arrived_s: float) -> tuple[Work, NewReader]:
    chat = chat_of(body)
    try:
        ask, new_reader = await chat_ask(service, chat)
        rules = text_rules(service, chat, markers(service, chat))
    except ApiError as error:
        raise in_own_words(error) from None
    session = session_of(request, {"user": body.user} | body.others)
    dp_rank = dp_rank_of(request, service.config, chat)
    ask = msgspec.structs.replace(ask, session=session, priority=priority_of(request, chat.priority), dp_rank=dp_rank)
    work = Work(
        caller=caller_of(request),
        asks=[ask],
        num_choices=1,
        num_prompt_tokens=len(ask.prompt_ids),
        rules=rules,
        arrived_s=arrived_s,
        request_id=request_id(request),
        traceparent=header(request.scope, TRACEPARENT.encode()) or "",
    )
    return work, new_reader


async def _whole(service: Service, work: Work, writer: ResponseWriter) -> Response:
    async with opened(service, work) as answer:
        async for pieces in Pieces(answer, texts_of(service, work)):
            for _, piece in pieces:
                writer.take(piece)
        written = writer.whole(usage_of(work, answer, writer.num_tokens))
        return JsonAnswer(written, headers=answer.headers)


async def _frames(service: Service, answer: Answer, work: Work, writer: ResponseWriter) -> AsyncGenerator[bytes, None]:
    """The events; the first ones come with the first token, so that a failure before it shows as a status."""
    has_begun = False
    try:
        async for pieces in Pieces(answer, texts_of(service, work)):
            opening = b"" if has_begun or not pieces else writer.opening()
            has_begun = has_begun or bool(pieces)
            if events := opening + b"".join(writer.push(piece) for _, piece in pieces):
                yield events
    except RequestFailedError as error:
        if not has_begun:
            raise
        yield writer.failed(error.cause.value, str(error))
        return
    yield writer.closing(usage_of(work, answer, writer.num_tokens))
