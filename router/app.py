"""The HTTP application: routes, errors and request ids."""

from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from router.answer import HEADERS
from router.api import admin, errors, generation, overview, status
from router.api.document import complete
from router.api.front import REQUEST_ID, Bodies, Front, key_needed
from router.records import TRACEPARENT
from router.service import Service

_EXPOSED = (REQUEST_ID, *HEADERS, TRACEPARENT, "retry-after")
"""Response headers that pages from other origins can read."""


def create_app(service: Service) -> ASGIApp:
    """Return the application. It runs in the event loop of the service's relay."""
    # The busiest handlers bypass FastAPI to avoid its overhead.
    busy = [route for route in generation.routes(service).routes if isinstance(route, APIRoute)]
    api = create_api(service)
    api.openapi()  # takes a third of a second, during which no client is served
    app: ASGIApp = Front(api, {route.path: route.endpoint for route in busy}, service)
    # CORS wraps everything: errors must name a page's origin for the page to read them, and a preflight has no key.
    if origins := service.config.router.allowed_origins:
        app = CORSMiddleware(
            app, allow_origins=origins, allow_methods=("GET", "POST"), allow_headers=("*",), expose_headers=_EXPOSED
        )
    return app


def create_api(service: Service) -> FastAPI:
    """Return all routes as a FastAPI application, which also documents them."""
    app = _Api(title="Baton", description="Long-context LLM serving with OpenAI's API.", redirect_slashes=False)
    app.state.bodies = Bodies(service.model.max_body_bytes)
    for routes in (generation.routes, status.model_routes):
        app.include_router(routes(service), dependencies=[key_needed(service)])
    for routes in (overview.routes, status.state_routes, admin.routes):
        app.include_router(routes(service))
    errors.install(app, service.metrics)
    return app


class _Api(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document, including bodies that routes parse and write themselves."""
        if self.openapi_schema is None:
            self.openapi_schema = complete(super().openapi())
        return self.openapi_schema
