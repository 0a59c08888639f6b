"""Models and engine processes, as for the integration tests."""

from tests.integration.conftest import engine, models

__all__ = ["engine", "models"]
