"""``/generate``: tokens in, tokens out."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from router.api.body import read
from router.api.document import document
from router.api.generation import job_of, respond
from router.api.intake import tokens_ask
from router.api.request_id import request_id
from router.api.requests import TokensRequest
from router.api.token_shape import Generation, TokenShape
from router.service import Service


def routes(service: Service) -> APIRouter:
    """The route that neither reads nor writes text."""
    router = APIRouter(tags=["generation"])

    @router.post("/generate", openapi_extra=document(TokensRequest, Generation))
    async def generate(request: Request) -> Response:
        """Continue a prompt of token ids with token ids; the fields are those of completions."""
        arrived_s = service.relay.now_s()
        body = await read(request, TokensRequest)
        asks = [await tokens_ask(service, body)]
        shape = TokenShape(request_id(request), service, body)
        return await respond(service, request, body, job_of(service, request, body, asks, shape, arrived_s))

    return router
