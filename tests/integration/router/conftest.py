"""A shared router, and one per test."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from router import connection
from tests.fakes.model_folder import write_model_folder
from tests.fakes.router_cluster import CONTEXT, RouterCluster, run_cluster


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model"), max_context=CONTEXT)


@pytest.fixture(scope="package")
def shared(folder: Path) -> Iterator[RouterCluster]:
    """Yield a router for tests that do not change replicas or table."""
    yield from run_cluster(folder)


@pytest.fixture
def cluster(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RouterCluster]:
    """Yield a router for tests that change replicas or table."""
    monkeypatch.setattr(connection, "WAITING_S", 0.5)
    yield from run_cluster(folder)


@pytest.fixture
def client(cluster: RouterCluster) -> Iterator[openai.OpenAI]:
    """Yield a client of a router whose decode replica may be told what to say."""
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        yield client
    cluster.decode.says = None
