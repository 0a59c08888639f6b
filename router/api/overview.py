"""Status page, and the data that it reads."""

import time
from importlib.resources import files
from urllib.parse import urlsplit

import msgspec
from fastapi import APIRouter
from starlette.responses import HTMLResponse, Response

from cluster.spec.registry import RankRecord, ReplicaEntry
from cluster.spec.version import VERSION
from router.api.front import key_needed
from router.connection import JsonAnswer
from router.service import Service


def routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["status"])
    page = _page()

    @router.get("/", response_class=HTMLResponse)
    async def overview() -> Response:
        """Show rates and latencies, replicas and their ranks, and open and finished requests."""
        return HTMLResponse(page, headers={"cache-control": "no-cache"})

    @router.get("/status", dependencies=[key_needed(service)])
    async def status() -> Response:
        """Return the status page's data."""
        return JsonAnswer(msgspec.json.encode(_status(service)))

    return router


def _page() -> str:
    folder = files("router.page")
    page, style, script = ((folder / f"status.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js"))
    return page.replace("/*style*/", style).replace("/*script*/", script)


def _status(service: Service) -> dict[str, object]:
    snapshot, metrics = service.directory.snapshot, service.metrics
    replicas = snapshot.replicas if snapshot is not None else ()
    kv_bytes = sum(sent.num_bytes for entry in replicas for sent in entry.load.sends)
    return {
        "version": VERSION,
        "cluster": service.config.name,
        "model": service.model.name,
        "time": time.time(),
        "started": service.started,
        "router": service.state,
        "totals": metrics.totals() | {"kv_bytes": kv_bytes},
        "latencies": {"ttft": metrics.ttft_s.counts(), "itl": metrics.itl_s.counts()},
        "replicas": [_replica(entry) for entry in replicas],
        "num_open": service.overview.num_open,
        "open": service.overview.open_entries(service.relay.now_s()),
        "recent": [summary.entry() for summary in service.overview.recent],
    }


def _replica(entry: ReplicaEntry) -> dict[str, object]:
    sent = {times.global_rank: times.num_bytes for times in entry.load.sends}
    return {
        "replica": entry.replica,
        "role": entry.role,
        "incarnation": entry.incarnation,
        "started": entry.incarnation / 1000,
        "ready": entry.ready,
        "load": entry.load,
        "ranks": [_rank(record, sent.get(record.global_rank, 0)) for record in entry.ranks],
    }


def _rank(record: RankRecord, sent_bytes: int) -> dict[str, object]:
    return msgspec.structs.asdict(record.coords) | {
        "global_rank": record.global_rank,
        "address": record.address,
        "node": urlsplit(record.address).hostname,
        "device": record.device,
        "sent_bytes": sent_bytes,
    }
