"""``/v1/completions`` and ``/v1/chat/completions``."""

from collections.abc import Sequence
from typing import cast

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from router.api.body import read
from router.api.chat import chat_ask, markers
from router.api.document import document
from router.api.dp_rank import dp_rank_of
from router.api.generate import Job, respond_stream, respond_whole
from router.api.headers import header
from router.api.intake import completion_asks
from router.api.keys import caller_of, priority_of
from router.api.prompt_logprobs import ShownPrompt
from router.api.request_id import request_id
from router.api.requests import ChatRequest, CompletionRequest, GenerationRequest
from router.api.responses import ChatCompletion, Completion
from router.api.sampling import choices_of, text_rules
from router.api.session import session_of
from router.api.shapes import ChatShape, CompletionShape, Shape
from router.flight import Ask
from router.service import Service
from router.tracing import TRACEPARENT


def routes(service: Service) -> APIRouter:
    """The routes that generate."""
    router = APIRouter(tags=["generation"])

    @router.post("/v1/completions", openapi_extra=document(CompletionRequest, Completion))
    async def completions(request: Request) -> Response:
        """Continue one or several prompts."""
        arrived_s = service.relay.now_s()
        body = await read(request, CompletionRequest)
        asks = await completion_asks(service, body)
        shape = CompletionShape(request_id(request), service, body, _prompts(service, body, asks))
        return await respond(service, request, body, job_of(service, request, body, asks, shape, arrived_s))

    @router.post("/v1/chat/completions", openapi_extra=document(ChatRequest, ChatCompletion))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        arrived_s = service.relay.now_s()
        body = await read(request, ChatRequest)
        ask, new_reader = await chat_ask(service, body)
        shape = ChatShape(request_id(request), service, body, new_reader, ask.prompt_ids)
        job = job_of(service, request, body, [ask], shape, arrived_s, markers(service, body))
        return await respond(service, request, body, job)

    return router


def job_of(
    service: Service,
    request: Request,
    body: GenerationRequest,
    asks: Sequence[Ask],
    shape: Shape,
    arrived_s: float,
    markers: Sequence[str] = (),
) -> Job:
    """Every choice of every prompt as an ask of its own."""
    session, priority = session_of(request, body.others), priority_of(request, body.priority)
    dp_rank = dp_rank_of(request, service.config, body)
    ours = [msgspec.structs.replace(ask, session=session, priority=priority, dp_rank=dp_rank) for ask in asks]
    return Job(
        caller=caller_of(request),
        asks=[choice for ask in ours for choice in choices_of(ask, body.num_choices)],
        num_choices=body.num_choices,
        num_prompt_tokens=sum(len(ask.prompt_ids) for ask in asks),
        rules=text_rules(service, body, markers),
        shape=shape,
        include_usage=body.include_usage,
        continuous_usage=body.continuous_usage,
        arrived_s=arrived_s,
        request_id=request_id(request),
        traceparent=header(request.scope, TRACEPARENT.encode()) or "",
    )


async def respond(service: Service, request: Request, body: GenerationRequest, job: Job) -> Response:
    """The answer, whole or as it comes."""
    return respond_stream(service, job) if body.stream else await respond_whole(service, request, job)


def _prompts(service: Service, body: CompletionRequest, asks: Sequence[Ask]) -> list[ShownPrompt]:
    """What answers show of each prompt."""
    if not body.echo:
        return [ShownPrompt(ask.prompt_ids) for ask in asks]
    skip = body.skip_special_tokens is not False
    match body.prompt:
        case str():
            texts = [body.prompt]
        case [str(), *_]:
            texts = cast(list[str], body.prompt)
        case _:
            texts = [service.tokenizer.decode([*ask.prompt_ids], skip) for ask in asks]
    return [ShownPrompt(ask.prompt_ids, text, skip) for ask, text in zip(asks, texts, strict=True)]
