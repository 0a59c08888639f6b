"""Members that live during overlapping faults, and the times at which a request could not be served by anyone."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product

from cluster.bootstrap.client import BootstrapClient
from cluster.cli.running import find_running
from cluster.spec.errors import BatonError
from cluster.spec.registry import ReplicaEntry
from tests.fakes.cluster import RunningCluster, answers, is_listened

ROUTER, BOOTSTRAP = "router", "bootstrap"
LOOK_S = 0.25
GRACE_S = 0.5
"""Time within which the router hears of a change."""


class Availability:
    """Observer of a cluster that is told of every fault.

    A replica lives from the time at which it is ready until a fault begins. It may not end without a fault.
    """

    def __init__(self, cluster: RunningCluster, name: str) -> None:
        note = find_running(name)
        assert note.bootstrap_url is not None
        self._url = cluster.url
        self._table = BootstrapClient(note.bootstrap_url, note.token)
        self._lock = threading.Lock()
        self._faults: Counter[str] = Counter()
        """Number of current faults by member."""
        self._cuts: Counter[frozenset[str]] = Counter()
        """Number of current cuts by pair of replicas."""
        self._living: dict[str, int] = {entry.replica: entry.incarnation for entry in self._table.table().replicas}
        """Incarnations of the living replicas."""
        self._least = dict.fromkeys(self._living, 0)
        """Incarnation from which on a replica counts as recovered."""
        self._entries: dict[str, ReplicaEntry] = {}
        """Latest table."""
        self._is_router_up = True
        self._gap_start_s: float | None = None
        self.gaps: list[tuple[float, float]] = []
        """Times from when no pair of replicas could serve a request until one could again."""
        self.unprovoked: list[str] = []
        """Replicas that were replaced without a fault."""

    @contextmanager
    def fault(self, member: str, *, is_fatal: bool = False) -> Iterator[None]:
        """Note a fault of a replica or the router. After a fatal one, only a later incarnation lives."""
        with self._lock:
            self._faults[member] += 1
            incarnation = self._living.pop(member, None)
            if is_fatal and incarnation is not None:
                self._least[member] = incarnation + 1
            self._is_router_up &= member != ROUTER
            self._reckon()
        try:
            yield
        finally:
            with self._lock:
                self._faults[member] -= 1

    @contextmanager
    def cut(self, one: str, other: str) -> Iterator[None]:
        """Note that messages between two members are lost. A replica that only others can reach does not live."""
        replicas = [member for member in dict.fromkeys((one, other)) if member not in (ROUTER, BOOTSTRAP)]
        with ExitStack() as stack:
            if len(replicas) == 1:
                stack.enter_context(self.fault(replicas[0]))
            pair = frozenset(replicas)
            with self._lock:
                self._cuts[pair] += 1
                self._reckon()
            try:
                yield
            finally:
                with self._lock:
                    self._cuts[pair] -= 1

    def is_last(self, member: str) -> bool:
        """Return whether a fault of this member leaves its role without a replica."""
        role = member.rpartition("-")[0]
        with self._lock:
            return bool(role) and not any(other.startswith(role) for other in self._living if other != member)

    def addresses(self, replica: str) -> list[str]:
        """Return the addresses of a replica's ranks. They may no longer exist."""
        with self._lock:
            entry = self._entries.get(replica)
        assert entry is not None, f"{replica} is being replaced"
        return [record.address for record in entry.ranks]

    def is_whole(self) -> bool:
        """Return whether every member lives."""
        with self._lock:
            return self._is_router_up and self._living.keys() == self._least.keys()

    def has_gap(self, start_s: float, end_s: float) -> bool:
        """Return whether nobody could serve a request at some moment between two times."""
        with self._lock:
            open_gap = [(self._gap_start_s, end_s)] if self._gap_start_s is not None else []
            return any(first <= end_s and start_s <= last + GRACE_S for first, last in [*self.gaps, *open_gap])

    def watch(self, ending: threading.Event) -> None:
        """Look again and again until the event."""
        while not ending.wait(LOOK_S):
            self._look()

    def _look(self) -> None:
        try:
            entries = self._table.table().replicas
        except BatonError:
            return  # the service is stopped or being replaced
        self._entries = {entry.replica: entry for entry in entries}
        has_returned = not self._is_router_up and answers(f"{self._url}/ready")
        ready = {entry.replica: entry.incarnation for entry in entries if _is_ready(entry)}
        with self._lock:
            self._is_router_up |= has_returned and not self._faults[ROUTER]
            for name, incarnation in ready.items():
                was = self._living.get(name)
                if was is not None and incarnation > was:
                    self.unprovoked.append(name)
                if not self._faults[name] and incarnation >= self._least[name]:
                    self._living[name] = incarnation
            self._reckon()

    def _reckon(self) -> None:
        prefills = [name for name in self._living if name.startswith("prefill")]
        decodes = [name for name in self._living if name.startswith("decode")]
        serves = self._is_router_up and any(not self._cuts[frozenset(pair)] for pair in product(prefills, decodes))
        if not serves and self._gap_start_s is None:
            self._gap_start_s = time.monotonic()
        elif serves and self._gap_start_s is not None:
            self.gaps.append((self._gap_start_s, time.monotonic()))
            self._gap_start_s = None


def _is_ready(entry: ReplicaEntry) -> bool:
    return entry.ready and not entry.load.draining and all(is_listened(record.address) for record in entry.ranks)
