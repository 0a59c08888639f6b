"""Routes about the model, the router and the cluster, for clients, load balancers, Prometheus and people."""

import time
from http import HTTPStatus
from importlib.resources import files
from typing import Annotated

import msgspec
from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import Field
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from cluster.spec.clock import read_clock
from cluster.spec.ids import Role
from cluster.spec.registry import ReplicaEntry
from cluster.spec.version import VERSION
from router.api.body import HARMLESS, Body, read, refuse_unsupported
from router.api.chat import chat_prompt
from router.api.document import document
from router.api.front import key_needed
from router.api.intake import check_model, encode, max_tokens, pack_token_ids
from router.api.requests import ChatMessage, TemplateBody
from router.errors import ApiError, NotReadyError, bad_request
from router.request_trace import RequestTrace
from router.service import Service

_HARMLESS = {
    name: HARMLESS[name] for name in ("chat_template", "continue_final_message", "documents", "truncate_prompt_tokens")
}
"""Unsupported fields that would change the prompt, with the values that have no effect."""


class TokenizeRequest(TemplateBody):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: list[int]


def model_routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["model"])

    @router.get("/v1/models")
    async def models() -> dict[str, object]:
        """List the served model."""
        return {"object": "list", "data": [_card(service)]}

    @router.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, object]:
        """Describe the served model."""
        check_model(service, model)
        return _card(service)

    @router.post("/tokenize", openapi_extra=document(TokenizeRequest))
    async def tokenize(request: Request) -> dict[str, object]:
        """Tokenize a prompt or messages as the generation routes do."""
        body = await read(request, TokenizeRequest)
        token_ids = await _tokenize(service, body)
        answer: dict[str, object] = {"count": len(token_ids), "max_model_len": max_tokens(service), "tokens": token_ids}
        if body.return_token_strs:
            answer["token_strs"] = [service.tokenizer.token_of(token_id) for token_id in token_ids]
        return answer

    @router.post("/detokenize", openapi_extra=document(DetokenizeRequest))
    async def detokenize(request: Request) -> dict[str, object]:
        """Return the text of token ids, including special tokens."""
        body = await read(request, DetokenizeRequest)
        check_model(service, body.model)
        pack_token_ids(service, body.tokens, "tokens")
        return {"prompt": service.tokenizer.decode(body.tokens, skip_special_tokens=False)}

    return router


def state_routes(service: Service) -> APIRouter:
    """Return the state routes. If API keys are configured, the routes that show the cluster require one."""
    router = APIRouter(tags=["status"])
    page = (files("router.page") / "status.html").read_text(encoding="utf-8")

    @router.get("/", response_class=HTMLResponse)
    async def overview() -> Response:
        """Show replicas and their ranks, queues, rates, and the latest finished requests."""
        return HTMLResponse(page, headers={"cache-control": "no-cache"})

    @router.get("/status", dependencies=[key_needed(service)])
    async def status() -> Response:
        """Return the status page's data."""
        return _json(_status(service))

    @router.get("/ping")
    @router.get("/health")
    async def health() -> dict[str, str]:
        """Return 200 while the router runs, whatever the state of the replicas."""
        return {"status": "ok"}

    @router.get("/load")
    async def load() -> dict[str, int]:
        """Return the number of this router process's open and waiting requests, under the key that vLLM uses."""
        return {"server_load": service.requests.num_open + service.gate.num_waiting}

    @router.get("/ready")
    async def ready() -> dict[str, object]:
        """Return 200 if requests are accepted, which requires a ready replica of each role."""
        if reason := service.relay.why_not_ready():
            raise NotReadyError(reason)
        return {"status": "ready"} | {role.value: len(service.directory.ready(role)) for role in Role}

    @router.get("/version")
    async def running_version() -> dict[str, str]:
        """Return Baton's version."""
        return {"version": VERSION}

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Return metrics in Prometheus text format."""
        return Response(generate_latest(service.metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST})

    @router.get("/cluster", dependencies=[key_needed(service)])
    async def cluster() -> Response:
        """Return the bootstrap table as this router last received it."""
        if service.directory.snapshot is None:
            raise NotReadyError("the bootstrap service has not answered yet")
        return _json(service.directory.snapshot)

    @router.get("/traces/{name}", dependencies=[key_needed(service)])
    async def trace(name: str) -> Response:
        """Return the trace of a recent traced request in Trace Event Format. Each router process has its own traces."""
        return _json(_ended(name, await service.relay.traces.gather(name)).events(read_clock()))

    return router


def _ended(name: str, trace: RequestTrace | None) -> RequestTrace:
    if trace is None:
        raise ApiError(HTTPStatus.NOT_FOUND, f"there is no trace {name}; a router process keeps only recent traces")
    if trace.router is None:
        raise ApiError(HTTPStatus.CONFLICT, f"the request of trace {name} has not ended")
    return trace


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


def _status(service: Service) -> dict[str, object]:
    snapshot = service.directory.snapshot
    replicas = snapshot.replicas if snapshot is not None else ()
    kv_bytes = sum(sent.num_bytes for entry in replicas for sent in entry.load.sends)
    return {
        "version": VERSION,
        "model": service.model.name,
        "time": time.time(),
        "router": service.state,
        "totals": service.metrics.totals() | {"kv_bytes": kv_bytes},
        "replicas": [_replica(entry) for entry in replicas],
        "recent": list(service.recent),
    }


def _replica(entry: ReplicaEntry) -> dict[str, object]:
    sent = {times.global_rank: times.num_bytes for times in entry.load.sends}
    ranks = [
        msgspec.structs.asdict(record.coords)
        | {"global_rank": record.global_rank, "address": record.address, "sent_bytes": sent.get(record.global_rank, 0)}
        for record in entry.ranks
    ]
    return {
        "replica": entry.replica,
        "role": entry.role,
        "incarnation": entry.incarnation,
        "ready": entry.ready,
        "load": entry.load,
        "ranks": ranks,
    }


async def _tokenize(service: Service, body: TokenizeRequest) -> list[int]:
    check_model(service, body.model)
    refuse_unsupported(body.others, _HARMLESS)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("prompt: exactly one of prompt and messages is required", "prompt")
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
