"""The HTTP application: its routes, its errors, its request ids."""

from typing import Any

from fastapi import FastAPI

from router.api import admin, errors, generation, models, response_routes, status, timelines, tokens
from router.api.document import complete
from router.api.keys import key_needed
from router.api.request_id import RequestIds
from router.service import Service


def create_app(service: Service) -> FastAPI:
    """The application over one service; runs in the event loop that the service's relay belongs to."""
    app = _App(title="Baton", description="Long-context LLM serving with OpenAI's API.", redirect_slashes=False)
    app.state.max_body_bytes = service.config.router.max_body_mib << 20

    for routes in (generation.routes, response_routes.routes, tokens.routes, models.routes, timelines.routes):
        app.include_router(routes(service), dependencies=[key_needed(service)])
    for routes in (status.routes, admin.routes):
        app.include_router(routes(service))
    errors.install(app, service.metrics)
    app.add_middleware(RequestIds)
    return app


class _App(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document, with the bodies that routes read and write for themselves."""
        if self.openapi_schema is None:
            self.openapi_schema = complete(super().openapi())
        return self.openapi_schema
