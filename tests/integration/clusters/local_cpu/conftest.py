"""The cluster of deploy/local-cpu.yaml, which all tests in this folder share."""

from collections.abc import Iterator

import pytest

from tests.fakes.cluster import RunningCluster, running_cluster
from tests.fakes.cluster_ends import signal_its_group

NAME = "test-local-cpu"
ADMIN_KEY = "key-of-the-administrator"


@pytest.fixture(scope="package")
def cluster() -> Iterator[RunningCluster]:
    env = {"BATON_ADMIN_KEY": ADMIN_KEY}
    with running_cluster("deploy/local-cpu.yaml", NAME, env=env, end=signal_its_group) as running:
        yield running
