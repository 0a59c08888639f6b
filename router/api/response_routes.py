"""``/v1/responses``: OpenAI's newer API for what chat completions give; nothing is stored."""

from collections.abc import AsyncGenerator

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from router.answer import Answer
from router.api.body import read
from router.api.chat import chat_request, markers
from router.api.connection import EventStream, JsonAnswer, unless_client_leaves
from router.api.document import document
from router.api.errors import ApiError
from router.api.front import request_id
from router.api.generation import Chunks, Job, make_job, opened, usage_of
from router.api.response_chat import chat_of, in_own_words
from router.api.response_objects import ResponseObject
from router.api.response_request import ResponseRequest
from router.api.response_writer import ResponseWriter
from router.errors import RequestFailedError
from router.message import NewReader
from router.service import Service


def routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["generation"])

    @router.post("/v1/responses", openapi_extra=document(ResponseRequest, ResponseObject))
    async def create_response(request: Request) -> Response:
        """Answer a text or a conversation."""
        arrived_s = service.relay.now_s()
        body = await read(request, ResponseRequest)
        job, new_reader = await _job(service, request, body, arrived_s)
        writer = ResponseWriter(request_id(request), service, body, new_reader())
        if body.stream:
            return EventStream(
                open_answer=lambda: opened(service, job),
                frames=lambda answer: _frames(service, answer, job, writer),
            )
        return await unless_client_leaves(request.receive, _whole(service, job, writer))

    return router


async def _job(service: Service, request: Request, body: ResponseRequest, arrived_s: float) -> tuple[Job, NewReader]:
    chat = chat_of(body)
    try:
        made, new_reader = await chat_request(service, chat)
        texts = markers(service, chat)
    except ApiError as error:
        raise in_own_words(error) from None
    fields = {"user": body.user} | body.others
    return make_job(service, request, chat, [made], arrived_s, texts, fields), new_reader


async def _whole(service: Service, job: Job, writer: ResponseWriter) -> Response:
    async with opened(service, job) as answer:
        async for chunks in Chunks(service, job, answer):
            for chunk in chunks:
                writer.take(chunk)
        written = writer.whole(usage_of(job, answer, writer.num_tokens))
        return JsonAnswer(written, headers=answer.headers)


async def _frames(service: Service, answer: Answer, job: Job, writer: ResponseWriter) -> AsyncGenerator[bytes, None]:
    """Yield the events; the first ones come with the first token, so that an earlier failure shows as a status."""
    has_begun = False
    try:
        async for chunks in Chunks(service, job, answer):
            opening = b"" if has_begun or not chunks else writer.opening()
            has_begun = has_begun or bool(chunks)
            if events := opening + b"".join(writer.push(chunk) for chunk in chunks):
                yield events
    except RequestFailedError as error:
        if not has_begun:
            raise
        yield writer.failed(error.cause.value, str(error))
        return
    yield writer.closing(usage_of(job, answer, writer.num_tokens))
