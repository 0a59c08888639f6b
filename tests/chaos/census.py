"""Resources of a cluster's processes: private memory over time, descriptors, shared memory."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import linear_regression

from cluster.bootstrap.client import BootstrapClient
from cluster.cli.running import find_running
from tests.chaos.faults import GONE, state_of
from tests.fakes.cluster import listener_pid, open_files


@dataclass
class Series:
    """Resident memory of one process over time, without the pools, which become resident as pages are used."""

    name: str
    points: list[tuple[float, float]] = field(default_factory=list)
    """Times in seconds and memory in MiB."""

    def slope(self, warm_up_s: float, least_s: float) -> float | None:
        """Return the growth in MiB per minute after the warm-up, or None if the process is too young.

        What counts is the least memory of each fifth of the time, which is what the process keeps after bursts.
        """
        kept = [point for point in self.points if point[0] >= self.points[0][0] + warm_up_s]
        if not kept or kept[-1][0] - kept[0][0] < max(least_s, 120.0):
            return None
        fifth_s = (kept[-1][0] - kept[0][0]) / 5
        # The last point would be an interval of its own, in which a burst counts in full.
        return 60 * linear_regression(*zip(*_least(kept[:-1], fifth_s), strict=True)).slope

    @property
    def least_mib(self) -> list[int]:
        """The least memory of each minute, in MiB."""
        return [round(mib) for _, mib in _least(self.points, 60.0)]


@dataclass(frozen=True)
class Holdings:
    """Resources of all processes together, by name."""

    descriptors: dict[str, int]
    shared_memories: int
    """Number of different shared memories."""


class Census:
    """Observer of a cluster's processes, across their restarts."""

    def __init__(self, name: str | None) -> None:
        """Observe the cluster with this name, or the only one on this machine."""
        note = find_running(name)
        self._driver = note.process.pid
        assert note.bootstrap_url is not None
        assert note.router_url is not None
        self._services = {"bootstrap": note.bootstrap_url, "router": note.router_url}
        self._table = BootstrapClient(note.bootstrap_url, note.token)
        self._pids: dict[str, int] = {}
        """Process ids by address."""
        self.series: dict[int, Series] = {}
        """Memory by process id."""

    def sample(self) -> None:
        """Record the memory of every process."""
        now_s = time.monotonic()
        for name, pid in self.processes().items():
            if (mib := _resident_mib(pid)) is not None:
                self.series.setdefault(pid, Series(name)).points.append((now_s, mib))

    def holdings(self) -> Holdings:
        """Return the resources in use."""
        links = {name: open_files(pid) for name, pid in self.processes().items()}
        shared = {link for found in links.values() for link in found if "memfd:baton" in link}
        return Holdings({name: len(found) for name, found in links.items()}, len(shared))

    def processes(self) -> dict[str, int]:
        """Return the process ids by name. Raises BatonError while the bootstrap service is down."""
        addresses = dict(self._services)
        for entry in self._table.table().replicas:
            addresses |= {f"{entry.replica} rank {record.global_rank}": record.address for record in entry.ranks}
        found = {"driver": self._driver}
        for name, address in addresses.items():
            pid = self._pids.get(address)
            if pid is None or state_of(pid) == GONE:
                try:
                    pid = self._pids[address] = listener_pid(address)
                except (AssertionError, ValueError):
                    continue  # it is being replaced
            found[name] = pid
        return found


def _least(points: Sequence[tuple[float, float]], seconds: float) -> list[tuple[float, float]]:
    """Return the point with the least memory of each interval of some seconds."""
    intervals = groupby(points, key=lambda point: (point[0] - points[0][0]) // seconds)
    return [min(part, key=itemgetter(1)) for _, part in intervals]


def _resident_mib(pid: int) -> float | None:
    try:
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return (int(fields["VmRSS"].split()[0]) - int(fields["RssShmem"].split()[0])) / 1024
    except (OSError, KeyError):
        return None  # it has just ended
