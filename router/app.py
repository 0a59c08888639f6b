"""The HTTP application: its routes, its errors, its request ids."""

from fastapi import FastAPI

from router.api import errors, generation, models, status
from router.api.request_id import RequestIds
from router.service import Service


def create_app(service: Service) -> FastAPI:
    """The application over one service; runs in the event loop that the service's relay belongs to."""
    app = FastAPI(title="Baton", description="Long-context LLM serving with OpenAI's API.", redirect_slashes=False)
    for routes in (generation.routes, models.routes, status.routes):
        app.include_router(routes(service))
    errors.install(app, service.metrics)
    app.add_middleware(RequestIds)
    return app
