"""``/v1/models``, ``/tokenize`` and ``/detokenize``."""

from fastapi import APIRouter
from starlette.requests import Request

from router.api.body import read
from router.api.chat import chat_prompt
from router.api.document import document
from router.api.intake import check_model, encode, max_tokens, pack_token_ids
from router.api.requests import DetokenizeRequest, TokenizeRequest
from router.api.unsupported import HARMLESS, refuse_unsupported
from router.errors import bad_request
from router.service import Service

_HARMLESS = {
    name: HARMLESS[name] for name in ("chat_template", "continue_final_message", "documents", "truncate_prompt_tokens")
}
"""Fields that would change the prompt."""


def routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["model"])

    @router.get("/v1/models")
    async def models() -> dict[str, object]:
        """The served model."""
        return {"object": "list", "data": [_card(service)]}

    @router.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, object]:
        """One model."""
        check_model(service, model)
        return _card(service)

    @router.post("/tokenize", openapi_extra=document(TokenizeRequest))
    async def tokenize(request: Request) -> dict[str, object]:
        """Token ids of a prompt or of messages, as the generating routes make them."""
        body = await read(request, TokenizeRequest)
        token_ids = await _tokenize(service, body)
        answer: dict[str, object] = {"count": len(token_ids), "max_model_len": max_tokens(service), "tokens": token_ids}
        if body.return_token_strs:
            answer["token_strs"] = [service.tokenizer.token_of(token_id) for token_id in token_ids]
        return answer

    @router.post("/detokenize", openapi_extra=document(DetokenizeRequest))
    async def detokenize(request: Request) -> dict[str, object]:
        """The text of token ids, special tokens included."""
        body = await read(request, DetokenizeRequest)
        check_model(service, body.model)
        pack_token_ids(service, body.tokens, "tokens")
        return {"prompt": service.tokenizer.decode(body.tokens, skip_special_tokens=False)}

    return router


async def _tokenize(service: Service, body: TokenizeRequest) -> list[int]:
    check_model(service, body.model)
    refuse_unsupported(body.others, _HARMLESS)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("prompt: give either prompt or messages", "prompt")
    if body.messages is not None:
        return (await chat_prompt(service, body.messages, body))[0]
    assert body.prompt is not None
    return await encode(service, body.prompt, body.add_special_tokens is not False)


def _card(service: Service) -> dict[str, object]:
    return {
        "id": service.model.name,
        "object": "model",
        "created": service.created_s,
        "owned_by": "baton",
        "root": service.config.model.path,
        "max_model_len": max_tokens(service),
    }
