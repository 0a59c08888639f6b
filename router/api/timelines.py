"""``/timelines/{id}``: what every process did for a request that asked to be timed."""

from http import HTTPStatus

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from cluster.spec.timeline import read_clock
from router.api.errors import ApiError
from router.service import Service
from router.trace_events import trace_of


def routes(service: Service) -> APIRouter:
    """The route that hands timelines out."""
    router = APIRouter(tags=["status"])

    @router.get("/timelines/{name}")
    async def timeline(name: str) -> Response:
        """The timeline of one of the newest timed requests, in the Trace Event Format."""
        gathered = await service.relay.timelines.gather(name)
        if gathered is None:
            raise ApiError(HTTPStatus.NOT_FOUND, f"there is no timeline {name}; the newest few are kept")
        if gathered.router is None:
            raise ApiError(HTTPStatus.CONFLICT, f"the request of timeline {name} has not ended")
        return Response(msgspec.json.encode(trace_of(gathered, read_clock())), media_type="application/json")

    return router
