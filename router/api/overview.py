"""``/``: a page that shows the cluster as it is, and what it reads, ``/status``."""

import time
from importlib.resources import files

import msgspec
from fastapi import APIRouter
from starlette.responses import HTMLResponse, Response

from cluster.spec.registry import ReplicaEntry
from cluster.spec.version import VERSION
from router.api.keys import key_needed
from router.service import Service


def routes(service: Service) -> APIRouter:
    """The page needs no key; what it shows needs one where others do."""
    router = APIRouter(tags=["status"])
    page = (files("router.page") / "status.html").read_text(encoding="utf-8")

    @router.get("/", response_class=HTMLResponse)
    async def overview() -> Response:
        """Replicas and their ranks, queues, rates, and the requests that ended last."""
        return HTMLResponse(page, headers={"cache-control": "no-cache"})

    @router.get("/status", dependencies=[key_needed(service)])
    async def status() -> Response:
        """What the page shows."""
        return Response(msgspec.json.encode(_status(service)), media_type="application/json")

    return router


def _status(service: Service) -> dict[str, object]:
    snapshot = service.directory.snapshot
    replicas = snapshot.replicas if snapshot is not None else ()
    kv_bytes = sum(sent.num_bytes for entry in replicas for sent in entry.load.sends)
    return {
        "version": VERSION,
        "model": service.model,
        "time": time.time(),
        "router": service.router_state,
        "totals": service.metrics.totals() | {"kv_bytes": kv_bytes},
        "replicas": [_replica(entry) for entry in replicas],
        "recent": service.newest,
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
