"""Running cluster before and after a fault: its members, its counters, and the time of each recovery step."""

import time

import httpx

from tests.chaos.report import Line, report
from tests.chaos.rest import if_answered
from tests.chaos.streams import Crowd
from tests.fakes.cluster import RunningCluster, listener_pid, listener_pids

RECOVERY_S = 240.0


def metric(cluster: RunningCluster, name: str) -> int:
    """Return a counter of the router."""
    lines = httpx.get(f"{cluster.url}/metrics", timeout=60, trust_env=False).text.splitlines()
    return int(float(next(line.split()[1] for line in lines if line.startswith(f"{name} "))))


def pid_of(cluster: RunningCluster, replica: str, rank: int = 0) -> int:
    """Return the process of one rank."""
    return listener_pid(cluster.replicas()[replica]["ranks"][rank]["address"])


def is_computing(cluster: RunningCluster, replica: str) -> bool:
    """Return whether the replica has a running request."""
    return bool(cluster.replicas()[replica]["load"]["num_running"] > 0)


class Before:
    """State of the cluster before a fault, and the time since then."""

    def __init__(self, cluster: RunningCluster, victim: str) -> None:
        """Record the state. ``victim`` is a replica, or a name that is not in the table."""
        self._cluster, self._victim = cluster, victim
        self.incarnations = {name: entry["incarnation"] for name, entry in cluster.replicas().items()}
        self._retries = metric(cluster, "baton_request_retries_total")
        self._continuations = metric(cluster, "baton_request_continuations_total")
        self._routers = listener_pids(cluster.url)
        self._start_s = time.monotonic()

    @property
    def passed_s(self) -> float:
        """Return the seconds since the fault."""
        return time.monotonic() - self._start_s

    def wait_detected(self) -> float:
        """Return the seconds until the table had no ready replica of this start."""
        self._cluster.wait_until(self._is_missing, RECOVERY_S)
        return self.passed_s

    def wait_recovered(self, *, is_new: bool = True) -> float:
        """Return the seconds until every replica was ready. With ``is_new``, the victim must be a later start."""
        self._cluster.wait_until(if_answered(lambda: self._is_whole(is_new)), RECOVERY_S)
        return self.passed_s

    def line(
        self, scenario: str, crowd: Crowd, proof: str, detection_s: float | None, recovery_s: float | None
    ) -> Line:
        """Return the report, with the routers' counters if they are still the same processes."""
        times = {"detection_s": detection_s, "recovery_s": recovery_s}
        if listener_pids(self._cluster.url) != self._routers:
            return report(scenario, self._cluster, crowd, proof, **times)
        retries = metric(self._cluster, "baton_request_retries_total") - self._retries
        continuations = metric(self._cluster, "baton_request_continuations_total") - self._continuations
        counts = {"retries": retries, "continuations": continuations}
        return report(scenario, self._cluster, crowd, proof, **times, **counts)

    def _is_missing(self) -> bool:
        entry = self._cluster.replicas().get(self._victim)
        return entry is None or not entry["ready"] or entry["incarnation"] > self.incarnations[self._victim]

    def _is_whole(self, is_new: bool) -> bool:
        replicas = self._cluster.replicas()
        return (
            replicas.keys() == self.incarnations.keys()
            and all(entry["ready"] for entry in replicas.values())
            and (not is_new or replicas[self._victim]["incarnation"] > self.incarnations[self._victim])
        )


def assert_all_right(cluster: RunningCluster, line: Line, crowd: Crowd) -> None:
    """Check that every client has its complete answer and that no page is in use."""
    ends = [stream.end for stream in crowd.streams]
    assert line.success == len(ends), f"{ends}\n{cluster.terminal.screen}"
    assert (line.failed, line.hung, line.leaked_pages) == (0, 0, 0)
