"""What the processes of a cluster hold: memory of their own over time, descriptors, shared memory."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import linear_regression

from cluster.bootstrap.client import BootstrapClient
from cluster.cli.running import find_running
from tests.chaos.faults import GONE, state_of
from tests.fakes.cluster import listener_pid


@dataclass
class Series:
    """Resident memory of one process over time, without the pools, which become resident as pages are used."""

    name: str
    points: list[tuple[float, float]] = field(default_factory=list)
    """Seconds and MiB."""

    def slope(self, warm_up_s: float, least_s: float) -> float | None:
        """MiB a minute by linear regression after the warm-up; None for a process that was not watched for long."""
        kept = [point for point in self.points if point[0] >= self.points[0][0] + warm_up_s]
        if len(kept) < 3 or kept[-1][0] - kept[0][0] < least_s:
            return None
        return 60 * linear_regression(*zip(*kept, strict=True)).slope


@dataclass(frozen=True)
class Holdings:
    """Of all processes together, by name."""

    descriptors: dict[str, int]
    shared_memories: int
    """Different ones."""


class Census:
    """Finds the processes of a cluster, however often they are replaced."""

    def __init__(self, name: str | None) -> None:
        """Of the cluster of this name, or of the only one that runs here."""
        note = find_running(name)
        self._driver = note.process.pid
        assert note.bootstrap_url is not None
        assert note.router_url is not None
        self._services = {"bootstrap": note.bootstrap_url, "router": note.router_url}
        self._table = BootstrapClient(note.bootstrap_url, note.token)
        self._pids: dict[str, int] = {}
        """By address."""
        self.series: dict[int, Series] = {}
        """By process."""

    def sample(self) -> None:
        """Note the memory of every process now."""
        now_s = time.monotonic()
        for name, pid in self.processes().items():
            if (mib := _resident_mib(pid)) is not None:
                self.series.setdefault(pid, Series(name)).points.append((now_s, mib))

    def holdings(self) -> Holdings:
        """What they hold now."""
        links = {name: _links(pid) for name, pid in self.processes().items()}
        shared = {link for found in links.values() for link in found if "memfd:baton" in link}
        return Holdings({name: len(found) for name, found in links.items()}, len(shared))

    def processes(self) -> dict[str, int]:
        """Those that are there, by name. Raises BatonError while the bootstrap service is away."""
        addresses = dict(self._services)
        for entry in self._table.table().replicas:
            addresses |= {f"{entry.replica} rank {row.global_rank}": row.address for row in entry.rows}
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


def _resident_mib(pid: int) -> float | None:
    try:
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return (int(fields["VmRSS"].split()[0]) - int(fields["RssShmem"].split()[0])) / 1024
    except (OSError, KeyError):
        return None  # it has just ended


def _links(pid: int) -> list[str]:
    """What the descriptors of a process stand for."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append(str(link.readlink()))
        except OSError:
            continue
    return found
