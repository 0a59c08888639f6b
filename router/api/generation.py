"""``/v1/completions`` and ``/v1/chat/completions``."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from router.api.body import document, read
from router.api.generate import Job, respond_stream, respond_whole
from router.api.intake import chat_ask, completion_asks
from router.api.request_id import request_id
from router.api.requests import ChatRequest, CompletionRequest
from router.api.shapes import ChatShape, CompletionShape
from router.service import Service


def routes(service: Service) -> APIRouter:
    """The routes that generate."""
    router = APIRouter(tags=["generation"])

    @router.post("/v1/completions", openapi_extra=document(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Continue one or several prompts."""
        arrived_s = service.relay.now_s()
        body = await read(request, CompletionRequest)
        job = Job(
            asks=await completion_asks(service, body),
            stops=body.stops,
            shape=CompletionShape(request_id(request), service.model, body),
            include_usage=body.include_usage,
            arrived_s=arrived_s,
        )
        return respond_stream(service, job) if body.stream else await respond_whole(service, request, job)

    @router.post("/v1/chat/completions", openapi_extra=document(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        arrived_s = service.relay.now_s()
        body = await read(request, ChatRequest)
        job = Job(
            asks=[await chat_ask(service, body)],
            stops=body.stops,
            shape=ChatShape(request_id(request), service.model, body),
            include_usage=body.include_usage,
            arrived_s=arrived_s,
        )
        return respond_stream(service, job) if body.stream else await respond_whole(service, request, job)

    return router
