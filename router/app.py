"""The HTTP application: its routes, its errors, its request ids."""

from typing import Any

from fastapi import FastAPI

from router.api import errors, generation, models, status, timelines
from router.api.body import component_schemas
from router.api.request_id import RequestIds
from router.service import Service


def create_app(service: Service) -> FastAPI:
    """The application over one service; runs in the event loop that the service's relay belongs to."""
    app = _App(title="Baton", description="Long-context LLM serving with OpenAI's API.", redirect_slashes=False)
    for routes in (generation.routes, models.routes, status.routes, timelines.routes):
        app.include_router(routes(service))
    errors.install(app, service.metrics)
    app.add_middleware(RequestIds)
    return app


class _App(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document, with the schemas of the bodies that routes read for themselves."""
        document = super().openapi()
        document.setdefault("components", {}).setdefault("schemas", {}).update(component_schemas())
        return document
