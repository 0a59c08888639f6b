"""How the router and its cluster are: for load balancers, Prometheus, people and ``baton status``."""

import msgspec
from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import PlainTextResponse, Response

from cluster.spec.lifecycle import Role
from cluster.spec.version import VERSION
from router.api.keys import key_needed
from router.errors import NotReadyError
from router.service import Service


def routes(service: Service) -> APIRouter:
    """The routes that tell how things are."""
    router = APIRouter(tags=["status"])

    @router.get("/health")
    async def health() -> dict[str, str]:
        """The router lives; says nothing of the replicas."""
        return {"status": "ok"}

    @router.get("/ready")
    async def ready() -> dict[str, object]:
        """A request would be taken: at least one replica of each role is ready."""
        if reason := service.relay.why_not_ready():
            raise NotReadyError(reason)
        return {"status": "ready"} | {role.value: len(service.directory.ready(role)) for role in Role}

    @router.get("/version")
    async def running_version() -> dict[str, str]:
        """Which Baton runs."""
        return {"version": VERSION}

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Prometheus' text format."""
        return Response(service.metrics.exposition(), headers={"content-type": CONTENT_TYPE_LATEST})

    @router.get("/cluster", dependencies=[key_needed(service)])
    async def cluster() -> Response:
        """The bootstrap table as this router last saw it."""
        if service.directory.snapshot is None:
            raise NotReadyError("the bootstrap service has not answered yet")
        return Response(msgspec.json.encode(service.directory.snapshot), media_type="application/json")

    return router
