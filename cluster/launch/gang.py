"""One incarnation of a replica: its bundles, its worker actors, and its startup until it is registered."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import closing
from functools import partial
from typing import Any

from cluster.actors import Actor, Reservation
from cluster.bootstrap.client import follow_table
from cluster.launch.kinds import worker_environ
from cluster.launch.tools import Table, Tools
from cluster.launch.waits import Deadline, DrainWatch, gather, raise_failure, send_until, wait_drained
from cluster.logs import ProcessLog
from cluster.placement import ReplicaPlacement
from cluster.spec.config import DeployConfig
from cluster.spec.errors import BatonError
from cluster.spec.ids import Incarnation, role_of
from cluster.spec.messages import Drain, Resume
from cluster.spec.ranks import coords_of, sizes_of
from cluster.spec.registry import RankRecord, TableSnapshot
from cluster.spec.step_messages import Shutdown
from cluster.spec.worker_spec import Rendezvous, WorkerSpec

_WATCH_S = 1.0
_RESUME_S = 20.0
"""Maximum wait for a replica to report that it accepts requests again."""
FETCH_TIMEOUT_S = 4 * 3600.0
"""Maximum wait for a replica's machines to have the model's files: long enough for 1.4 TB at 100 MB/s."""


class Gang:
    """Workers of one replica, which live and die together. Except ``start``, methods may run in any thread."""

    def __init__(
        self,
        tools: Tools,
        config: DeployConfig,
        placement: ReplicaPlacement,
        incarnation: Incarnation,
        hosts: Sequence[str],
    ) -> None:
        """Prepare the workers; ``hosts`` are their machines' addresses by global rank."""
        self._tools = tools
        self._system = tools.system
        self._config = config
        self._placement = placement
        self._incarnation = incarnation
        self._hosts = hosts
        self._lock = threading.Lock()
        self._killed = False
        self._actors: list[Actor] = []
        self._reservation: Reservation | None = None
        self._records: list[RankRecord] = []
        self.runs: dict[str, Future[Any]] = {}
        """Pending call of ``run`` on each rank, by rank name."""

    @property
    def has_bundles(self) -> bool:
        return self._reservation is not None

    def start(self, model: str, rendezvous: Callable[[], Rendezvous]) -> None:
        """Start the replica; return once the rank table shows it as ready.

        Raises:
            BatonError: the first failure of a rank, with the rank's name; the caller kills the gang.
        """
        name, resources = self._placement.replica, self._config.resources
        self._tools.progress(name, "starting processes")
        self._start_actors(Deadline(resources.start_timeout_s))
        self._tools.progress(name, "finding or downloading the model")
        fetching = Deadline(FETCH_TIMEOUT_S, "the limit on downloading the model")
        gather(self._call_each("fetch", [(model,)] * len(self._actors)), fetching)
        deadline = Deadline(resources.start_timeout_s)
        meeting = rendezvous()
        specs = self._specs()
        self._tools.progress(name, "loading weights")
        gather(self._call_each("build", [(spec, meeting) for spec in specs]), deadline)
        store = gather({self._who(0): self._system.call(self._actors[0], "open_store")}, deadline)[0]
        self._records = gather(self._call_each("load", [(store,)] * len(specs)), deadline)
        self.runs = self._call_each("run", [(self._records,)] * len(specs))
        self._tools.progress(name, "announcing")
        self._wait_ready(meeting, deadline)

    def drain(self, meeting: Rendezvous, timeout_s: float) -> bool:
        """Stop accepting requests; return whether all open requests ended in time."""
        deadline = Deadline(timeout_s)
        watch = DrainWatch(self._placement.replica, self._incarnation)
        with closing(self._tools.connect(meeting)) as table:
            return self._send_until_shown(table, Drain(), deadline) and wait_drained(table, watch, deadline)

    def resume(self, meeting: Rendezvous) -> bool:
        """Accept requests again; return whether the replica confirmed it."""
        with closing(self._tools.connect(meeting)) as table:
            return self._send_until_shown(table, Resume(), Deadline(_RESUME_S))

    def stop(self, timeout_s: float) -> None:
        """Ask the workers to end, and wait for them; ``kill`` ends the remaining ones."""
        self._tools.send([record.address for record in self._records], Shutdown())
        wait(self.runs.values(), timeout_s)

    def kill(self, timeout_s: float) -> bool:
        """Kill every process and release the bundles; return whether all processes are confirmed dead."""
        with self._lock:
            self._killed = True
            actors = list(self._actors)
            reservation, self._reservation = self._reservation, None
        gone = self._system.kill(actors, timeout_s)
        if reservation is not None:
            self._system.release(reservation)
        return gone

    def lives(self, timeout_s: float) -> bool:
        with self._lock:
            actors = list(self._actors)
        return self._system.live(actors, timeout_s)

    def _send_until_shown(self, table: Table, message: Drain | Resume, deadline: Deadline) -> bool:
        """Repeat a message to the leader until the table shows its effect; return False at the deadline."""

        def is_shown(snapshot: TableSnapshot) -> bool:
            entry = snapshot.find(self._placement.replica)
            if entry is None or entry.incarnation != self._incarnation:
                return False
            return entry.load.draining == isinstance(message, Drain)

        send = partial(self._tools.send, [self._records[0].address], message)
        return send_until(table, is_shown, send, deadline)

    def _start_actors(self, deadline: Deadline) -> None:
        bundles = self._placement.bundles
        reservation = self._system.reserve(self._actor_name("bundles"), bundles, deadline.left_s())
        with self._lock:
            self._reservation = reservation
        for rank in range(len(bundles)):
            arguments, name = [self._log(rank), worker_environ(self._config)], self._actor_name(f"rank{rank}")
            with self._lock:
                if self._killed:
                    raise BatonError(f"{self._placement.replica}: stopped while it was starting")
                actor = self._system.start(
                    self._tools.worker, arguments, name=name, title=self._title(rank), bundle=(reservation, rank)
                )
                self._actors.append(actor)

    def _specs(self) -> list[WorkerSpec]:
        return [
            WorkerSpec(
                config=self._config,
                replica=self._placement.replica,
                incarnation=self._incarnation,
                global_rank=rank,
                host=host,
            )
            for rank, host in enumerate(self._hosts)
        ]

    def _call_each(self, method: str, args: Sequence[tuple[object, ...]]) -> "dict[str, Future[Any]]":
        calls = (self._system.call(actor, method, *given) for actor, given in zip(self._actors, args, strict=True))
        return {self._who(rank): call for rank, call in enumerate(calls)}

    def _wait_ready(self, meeting: Rendezvous, deadline: Deadline) -> None:
        with closing(self._tools.connect(meeting)) as table:
            for snapshot in follow_table(table.watch, lambda: _WATCH_S):
                entry = None if snapshot is None else snapshot.find(self._placement.replica)
                if entry is not None and entry.ready and entry.incarnation == self._incarnation:
                    return
                raise_failure(self.runs, deadline)
                if ended := [who for who, run in self.runs.items() if run.done()]:
                    raise BatonError(f"{', '.join(ended)}: ended immediately")
                if not deadline.left_s():
                    raise deadline.missed(f"{self._placement.replica}: not ready in the rank table")

    def _log(self, rank: int) -> ProcessLog:
        return ProcessLog(process=self._who(rank), config=self._config.log, session=self._tools.session)

    def _title(self, rank: int) -> str:
        sizes = sizes_of(self._config.pools[role_of(self._placement.replica)].parallel)
        coords = coords_of(rank, sizes)
        axes = [f"{axis}{getattr(coords, axis)}" for axis in ("dp", "cp", "tp", "pp") if getattr(sizes, axis) > 1]
        return " ".join([self._placement.replica, *axes])

    def _who(self, rank: int) -> str:
        return f"{self._placement.replica} rank {rank}"

    def _actor_name(self, part: str) -> str:
        return f"{self._placement.replica}-{part}-{self._incarnation}"
