"""One router that is shared, and one a test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from router import connection
from tests.fakes.model_folder import write_model_folder
from tests.fakes.router_cluster import CONTEXT, RouterCluster, run_cluster


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model"), max_context=CONTEXT)


@pytest.fixture(scope="package")
def shared(folder: Path) -> Iterator[RouterCluster]:
    """For tests that leave replicas and table as they are."""
    yield from run_cluster(folder)


@pytest.fixture
def cluster(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RouterCluster]:
    """For tests that change them."""
    monkeypatch.setattr(connection, "COMMENT_S", 0.5)
    yield from run_cluster(folder)
