"""Clusters whose workers can be made to fail."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.chaos.faulty_worker import FOLDER
from tests.fakes.cluster import RunningCluster, running_cluster
from tests.readme import ROOT


@contextmanager
def faulty_cluster(folder: Path, name: str, *settings: str, arguments: Sequence[str] = ()) -> Iterator[RunningCluster]:
    """Run ``deploy/local-cpu.yaml`` until Ctrl-C, with workers that read their faults from a folder."""
    program = (sys.executable, "-m", "tests.chaos.faulty_up")
    env = {FOLDER: str(folder), "PYTHONPATH": str(ROOT)}
    deploy = "deploy/local-cpu.yaml"
    with running_cluster(deploy, name, *settings, arguments=arguments, program=program, env=env) as running:
        yield running
