"""The state of the router and its cluster: for load balancers, Prometheus, people, ``baton status`` and Perfetto."""

import time
from http import HTTPStatus
from importlib.resources import files

import msgspec
from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from cluster.spec.lifecycle import Role
from cluster.spec.registry import ReplicaEntry
from cluster.spec.trace import read_clock
from cluster.spec.version import VERSION
from router.api.front import key_needed
from router.errors import ApiError, NotReadyError
from router.service import Service


def routes(service: Service) -> APIRouter:
    """Return the routes about the state; those that show the cluster need a key where others do."""
    router = APIRouter(tags=["status"])
    page = (files("router.page") / "status.html").read_text(encoding="utf-8")

    @router.get("/", response_class=HTMLResponse)
    async def overview() -> Response:
        """Replicas and their ranks, queues, rates, and the requests that ended last."""
        return HTMLResponse(page, headers={"cache-control": "no-cache"})

    @router.get("/status", dependencies=[key_needed(service)])
    async def status() -> Response:
        """The data of the page."""
        return _json(_status(service))

    @router.get("/health")
    async def health() -> dict[str, str]:
        """The router lives; says nothing about the replicas."""
        return {"status": "ok"}

    @router.get("/ready")
    async def ready() -> dict[str, object]:
        """A request would be admitted: at least one replica of each role is ready."""
        if reason := service.relay.why_not_ready():
            raise NotReadyError(reason)
        return {"status": "ready"} | {role.value: len(service.directory.ready(role)) for role in Role}

    @router.get("/version")
    async def running_version() -> dict[str, str]:
        """Baton's version."""
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
        return _json(service.directory.snapshot)

    @router.get("/traces/{name}", dependencies=[key_needed(service)])
    async def trace(name: str) -> Response:
        """The trace of one of this process's newest traced requests, in the Trace Event Format."""
        found = await service.relay.traces.gather(name)
        if found is None:
            raise ApiError(HTTPStatus.NOT_FOUND, f"there is no trace {name}; each router process keeps its newest few")
        if found.router is None:
            raise ApiError(HTTPStatus.CONFLICT, f"the request of trace {name} has not ended")
        return _json(found.events(read_clock()))

    return router


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
        "recent": [finished.summary() for finished in service.recent],
    }


def _replica(entry: ReplicaEntry) -> dict[str, object]:
    sent = {times.global_rank: times.num_bytes for times in entry.load.sends}
    ranks = [
        msgspec.structs.asdict(row.coords)
        | {"global_rank": row.global_rank, "address": row.address, "sent_bytes": sent.get(row.global_rank, 0)}
        for row in entry.rows
    ]
    return {
        "replica": entry.replica,
        "role": entry.role,
        "incarnation": entry.incarnation,
        "ready": entry.ready,
        "load": entry.load,
        "ranks": ranks,
    }
