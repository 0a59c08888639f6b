"""Models and engine processes that the modules in this folder share."""

from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from workers.bench.process import WORKER

if TYPE_CHECKING:
    from tests.fakes.local_engine import LocalEngine, Models


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> "Models":
    from tests.fakes.local_engine import Models

    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest) -> "Iterator[LocalEngine]":
    """Yield processes that serve case after case, with the worker class that the module names as WORKER."""
    from tests.fakes.local_engine import LocalEngine

    with closing(LocalEngine(getattr(request.module, "WORKER", WORKER))) as engine:
        yield engine
