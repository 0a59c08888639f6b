"""The cluster of deploy/local-cpu.yaml, started as README says, which all tests in this folder share."""

import os
import shlex
import sys
from collections.abc import Iterator

import pytest

from tests import readme
from tests.fakes.cluster import IS_UP, START_S, RunningCluster
from tests.terminal import Terminal

NAME = "local-cpu"
ADMIN_KEY = "key-of-the-administrator"


@pytest.fixture(scope="package")
def cluster() -> Iterator[RunningCluster]:
    # The environment of the tests replaces the one that make would create. make allows no spaces in a target's path.
    make = [*shlex.split(readme.command("make serve")), f"VENV={os.path.relpath(sys.prefix, readme.ROOT)}"]
    with Terminal(make, {"BATON_ADMIN_KEY": ADMIN_KEY}) as terminal:
        terminal.wait_until(lambda: IS_UP in terminal.output, START_S)
        cluster = RunningCluster("http://127.0.0.1:8000", terminal, NAME)
        yield cluster
        cluster.stop()
