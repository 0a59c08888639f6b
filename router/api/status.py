"""Routes about the model, the router and the cluster, for clients, load balancers, Prometheus and people."""

import asyncio
from http import HTTPStatus
from math import inf

import msgspec
from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from cluster.spec.clock import read_clock
from cluster.spec.ids import Role
from cluster.spec.version import VERSION
from router.api.document import document
from router.api.front import arrival_of, key_needed, preprocess
from router.connection import JsonAnswer
from router.errors import ApiError, NotReadyError
from router.preprocess.body import shortened
from router.preprocess.intake import check_model
from router.preprocess.job import JsonText, Route
from router.preprocess.preprocessor import DetokenizeRequest, TokenizeRequest
from router.request_trace import RequestTrace
from router.service import Service
from router.state_metrics import ReplicaMetrics


def model_routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["model"])

    @router.get("/v1/models")
    async def models() -> dict[str, object]:
        """List the served model."""
        return {"object": "list", "data": [_card(service)]}

    @router.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, object]:
        """Describe the served model."""
        check_model(service.model, model)
        return _card(service)

    @router.post(Route.TOKENIZE, openapi_extra=document(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """Tokenize a prompt or messages as the generation routes do."""
        return await _text(service, request, Route.TOKENIZE)

    @router.post(Route.DETOKENIZE, openapi_extra=document(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """Return the text of token ids, including special tokens."""
        return await _text(service, request, Route.DETOKENIZE)

    return router


def state_routes(service: Service) -> APIRouter:
    """Return the state routes. If API keys are configured, the routes that show the cluster require one."""
    router = APIRouter(tags=["status"])
    rendering = _Rendering(service)

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
    async def metrics(request: Request) -> Response:
        """Return metrics in Prometheus text format."""
        text = await rendering.since(arrival_of(request).arrived_s)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    @router.get("/cluster", dependencies=[key_needed(service)])
    async def cluster() -> Response:
        """Return the bootstrap table as this router last received it."""
        if service.directory.snapshot is None:
            raise NotReadyError("the bootstrap service has not answered yet")
        return JsonAnswer(msgspec.json.encode(service.directory.snapshot))

    @router.get("/traces/{name}", dependencies=[key_needed(service)])
    async def trace(name: str) -> Response:
        """Return the trace of a recent traced request in Trace Event Format. Each router process has its own traces."""
        ended = _ended(name, await service.relay.traces.gather(name))
        return JsonAnswer(await ended.text(read_clock()))

    return router


class _Rendering:
    """Newest text of the metrics. It answers all requests that waited for it."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._lock = asyncio.Lock()
        self._begun_s = -inf
        self._text = b""

    async def since(self, arrived_s: float) -> bytes:
        """Return the metrics as of ``arrived_s`` or later."""
        async with self._lock:
            if arrived_s >= self._begun_s:
                begun_s = self._service.relay.now_s()
                self._text = await self._render()
                self._begun_s = begun_s
            return self._text

    async def _render(self) -> bytes:
        replicas = CollectorRegistry()
        replicas.register(ReplicaMetrics(self._service.directory.snapshot))
        # Dozens of replicas take a tenth of a second, for which no stream should wait.
        return generate_latest(self._service.metrics.registry) + await asyncio.to_thread(generate_latest, replicas)


def _ended(name: str, trace: RequestTrace | None) -> RequestTrace:
    if trace is None:
        raise ApiError(
            HTTPStatus.NOT_FOUND, f"there is no trace {shortened(name)}; a router process keeps only recent traces"
        )
    if trace.router is None:
        raise ApiError(HTTPStatus.CONFLICT, f"the request of trace {shortened(name)} has not ended")
    return trace


async def _text(service: Service, request: Request, route: Route) -> Response:
    made = await preprocess(service, request, route)
    assert isinstance(made, JsonText)
    return Response(made.text, media_type="application/json")


def _card(service: Service) -> dict[str, object]:
    return {
        "id": service.model.name,
        "object": "model",
        "created": int(service.started),
        "owned_by": "baton",
        "root": service.config.model.path,
        "max_model_len": service.max_tokens,
    }
