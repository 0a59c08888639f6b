"""Starts and ends the members of one cluster: bootstrap service, router, replicas. Decides nothing by itself.

Start order: everybody's process at once; the bootstrap service serves; then, at the same time, the router serves and
each replica joins its group, loads, and announces itself.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol
from urllib.parse import urlsplit

from cluster.actors import Machine
from cluster.launch.calls import LAST_WORDS_S, Deadline, labelled
from cluster.launch.gang import Gang
from cluster.launch.services import BOOTSTRAP, BootstrapProcess, RouterProcess
from cluster.launch.tools import Tools
from cluster.placement import ReplicaPlacement, place
from cluster.spec.config import DeployConfig, TransferBackendName
from cluster.spec.errors import BatonError, PeerLostError
from cluster.spec.ids import Incarnation, ReplicaId
from cluster.spec.worker_spec import Rendezvous, RouterShare, router_shares

LOOPBACK = "127.0.0.1"
STOP_S = 5.0
"""Time for workers to end by themselves; after that they are killed."""
KILL_S = 5.0
"""Time for the kernel to end killed processes."""
AT_ONCE_S = 0.5
"""The same for somebody who has asked twice; the end of the Ray cluster is the end of what is left."""
GRACE_S = 2.0
"""Beyond both: who asks a Ray that has died itself may never get an answer."""

OnEnded = Callable[[str, Incarnation, BaseException], None]
"""Told once for every process that ends: whose, which start of it, why."""


class Member(Protocol):
    """What every member's start has in common."""

    runs: dict[str, "Future[Any]"]
    """The calls that its processes live in; as long as there are none, nobody else knows of it."""

    def kill(self, timeout_s: float) -> bool:
        """End every process; True when all of them are proven gone."""
        ...


class Launcher:
    """All members of one cluster. Methods may run in several threads, one thread a member."""

    def __init__(self, tools: Tools, config: DeployConfig, model: str, token: str, on_ended: OnEnded) -> None:
        """Place the replicas.

        Args:
            model: Path or repository that every process resolves on its own machine.

        Raises:
            ConfigError: the replicas do not fit on the machines.
        """
        self._tools = tools
        self._config = config
        self._model = model
        self._token = token
        self._on_ended = on_ended
        machines = tools.system.machines()
        self._is_alone = len(machines) == 1
        """One machine talks to itself by loopback, which another one that joins later cannot reach."""
        self._placements = {placement.replica: placement for placement in place(config, machines)}
        self._hosts = {m.node_id: LOOPBACK if self._is_alone else m.address for m in machines}
        self._home_host = self._hosts[tools.system.home.node_id]
        self._lock = threading.Lock()
        self._running: dict[str, Member] = {}
        self._unproven: dict[tuple[str, Incarnation], Member] = {}
        """Ended members whose processes may still live."""
        self._lost: dict[tuple[str, Incarnation], set[str]] = {}
        """Machines on which their end was not proven; Ray takes longer to see that one is gone."""
        self._rendezvous: Future[Rendezvous] = Future()
        self._bootstrap_port = 0
        self._port_lock = threading.Lock()
        self._routers: dict[str, RouterShare] = {share.name: share for share in router_shares(config.router.processes)}
        self._own_urls: dict[str, str] = {}
        self.router_url = ""
        """Base URL of the endpoint; empty before the router has started."""

    @property
    def names(self) -> list[str]:
        """Names of everything that has to run."""
        return [BOOTSTRAP, *self._routers, *self._placements]

    @property
    def rendezvous(self) -> "Future[Rendezvous]":
        """Where the bootstrap service is, once it has started; it never moves."""
        return self._rendezvous

    @property
    def router_names(self) -> list[str]:
        """Names of the router processes."""
        return list(self._routers)

    def own_router_url(self, name: str) -> str:
        """Return where one router process alone answers, or answered last."""
        process = self._running.get(name)
        if isinstance(process, RouterProcess) and process.own_url:
            self._own_urls[name] = process.own_url
        return self._own_urls[name]

    def start(self, name: str, incarnation: Incarnation) -> None:
        """Start a member; returns when it is ready, and reports from then on when it ends.

        Raises:
            BatonError: what stopped it; the caller ends the member.
        """
        deadline = Deadline(self._config.resources.start_timeout_s)
        if name == BOOTSTRAP:
            self._start_bootstrap(incarnation, deadline)
        elif name in self._routers:
            self._start_router(self._routers[name], incarnation, deadline)
        else:
            self._start_gang(self._living_placement(ReplicaId(name)), incarnation)
        self._tools.progress(name, "ready")
        for who, run in self._running[name].runs.items():
            run.add_done_callback(partial(self._report_end, name, incarnation, who))

    def end(self, name: str, incarnation: Incarnation) -> bool:
        """Kill a member and give back what it held; True when its processes are proven gone."""
        with self._lock:
            member = self._running.pop(name, None)
        if member is None:
            return True
        self._unproven[name, incarnation] = member
        if member.kill(KILL_S):
            del self._unproven[name, incarnation]
            return True
        self._lost[name, incarnation] = self._away_from_home(name)
        return False

    def prove(self, name: str, incarnation: Incarnation) -> bool:
        """Kill what ``end`` was to end; True, once, when it can write nowhere any more.

        It is proven gone then, or nobody ever knew of it: a process that did not come up may have left nothing to ask.
        """
        member = self._unproven[name, incarnation]
        if not member.kill(KILL_S) and member.runs:
            return False
        del self._unproven[name, incarnation]
        self._lost.pop((name, incarnation), None)
        return True

    def mark_ended(self, replica: ReplicaId, incarnation: Incarnation, *, proven: bool) -> None:
        """Tell the rank table that a start is over; proven: no process of it is left. Raises PeerUnreachableError."""
        table = self._tools.connect(self._rendezvous.result())
        try:
            table.unregister(replica, incarnation, reaped=proven)
        finally:
            table.close()

    def place(self, names: Sequence[str]) -> None:
        """Find seats for new replicas.

        Raises:
            ConfigError: there is no room for all of them.
        """
        machines = self._usable_machines()
        self._hosts |= {m.node_id: m.address for m in machines if m.node_id not in self._hosts}
        placements = place(self._config, machines, [ReplicaId(name) for name in names])
        self._placements |= {placement.replica: placement for placement in placements}

    def drain_replica(self, name: str, grace_s: float | None) -> bool:
        """Let a replica finish what it has taken; True when that ended in time."""
        timeout_s = self._config.router.drain_s if grace_s is None else grace_s
        gang = self._running.get(name)
        return isinstance(gang, Gang) and gang.drain(self._rendezvous.result(), timeout_s)

    def resume_replica(self, name: str) -> bool:
        """Let a replica take new requests again; True when the rank table shows that it does."""
        gang = self._running.get(name)
        return isinstance(gang, Gang) and gang.resume(self._rendezvous.result())

    def drain(self) -> bool:
        """Let the router finish its open requests, and replicas store their pages; True when all requests have ended.

        What is not stored in time is lost, and no request is the worse for it.
        """
        deadline = Deadline(self._config.router.drain_s)
        routers = [member for member in self._snapshot() if isinstance(member, RouterProcess)]
        for router in routers:
            router.begin_drain()
        # Each is waited for, whatever came of the one before.
        drained = [router.wait_drained(deadline.left_s()) for router in routers]
        if self._config.hicache.is_stored:
            meeting = self._rendezvous.result()
            gangs = [member for member in self._snapshot() if isinstance(member, Gang) and member.runs]
            _each(gangs, lambda gang: gang.drain(meeting, deadline.left_s()), deadline.left_s())
        return all(drained)

    def stop(self) -> None:
        """Let the workers end by themselves, then kill everything."""
        gangs = [member for member in self._snapshot() if isinstance(member, Gang)]
        _each(gangs, lambda gang: gang.stop(STOP_S), STOP_S + GRACE_S)
        self._kill(KILL_S + GRACE_S)

    def kill(self) -> None:
        """Kill everything at once."""
        self._kill(AT_ONCE_S)

    def _kill(self, timeout_s: float) -> None:
        """Returns in time even when Ray does not answer."""
        _each(self._snapshot(), lambda member: member.kill(min(KILL_S, timeout_s)), timeout_s)

    def _start_bootstrap(self, incarnation: Incarnation, deadline: Deadline) -> None:
        process = BootstrapProcess(self._tools, incarnation)
        self._keep(BOOTSTRAP, process)
        try:
            url = process.start(self._home_host, self._bootstrap_port, self._token, deadline)
        except BatonError as error:
            if not self._rendezvous.done():
                self._rendezvous.set_exception(error)
            raise
        self._bootstrap_port = urlsplit(url).port or 0
        if not self._rendezvous.done():
            self._rendezvous.set_result(self._meeting(url))

    def _meeting(self, url: str) -> Rendezvous:
        return Rendezvous(bootstrap_url=url, token=self._token, channel_key=self._tools.channel_key)

    def _start_router(self, share: RouterShare, incarnation: Incarnation, deadline: Deadline) -> None:
        process = RouterProcess(self._tools, incarnation, share)
        self._keep(share.name, process)
        meeting = self._rendezvous.result()
        with self._port_lock:  # one after the other: the first may have to find a port
            self.router_url = process.start(self._config, self._model, meeting, self._home_host, deadline)
            self._keep_port()

    def _keep_port(self) -> None:
        # Should it have to start again, its clients look for it where it was.
        router = self._config.router.model_copy(update={"port": urlsplit(self.router_url).port})
        self._config = self._config.model_copy(update={"router": router})

    def _start_gang(self, placement: ReplicaPlacement, incarnation: Incarnation) -> None:
        hosts = [self._hosts[seat.node_id] for seat in placement.seats]
        gang = Gang(self._tools, self._config, placement, incarnation, hosts)
        self._keep(placement.replica, gang)
        gang.start(self._model, self._rendezvous.result)

    def _living_placement(self, replica: ReplicaId) -> ReplicaPlacement:
        """Where a replica was, or somewhere else if a machine of it is lost. Raises ConfigError: there is no room."""
        usable = {machine.node_id for machine in self._usable_machines()}
        if any(seat.node_id not in usable for seat in self._placements[replica].seats):
            self.place([replica])
        return self._placements[replica]

    def _away_from_home(self, name: str) -> set[str]:
        """Machines of a replica, or of a service none, whose silence may be that of the machine."""
        placement = self._placements.get(ReplicaId(name))
        seats = placement.seats if placement is not None else ()
        return {seat.node_id for seat in seats} - {self._tools.system.home.node_id}

    def _usable_machines(self) -> list[Machine]:
        """Where replicas may go: no machine that is lost, and with shared memory only where the others are."""
        lost = {node_id for node_ids in self._lost.values() for node_id in node_ids}
        machines = [machine for machine in self._tools.system.machines() if machine.node_id not in lost]
        if self._config.transfer.backend is TransferBackendName.SHARED_MEMORY:
            used = {seat.node_id for placement in self._placements.values() for seat in placement.seats}
            return [machine for machine in machines if machine.node_id in used]
        return [machine for machine in machines if machine.node_id in self._hosts or not self._is_alone]

    def _report_end(self, name: str, incarnation: Incarnation, who: str, run: "Future[Any]") -> None:
        report = partial(self._on_ended, name, incarnation, _why(who, run))
        if not isinstance(run.exception(), PeerLostError):
            report()
            return
        # Somebody else ended first, and says why; this one speaks only if nobody does.
        timer = threading.Timer(LAST_WORDS_S, report)
        timer.daemon = True
        timer.start()

    def _keep(self, name: str, member: Member) -> None:
        with self._lock:
            self._running[name] = member

    def _snapshot(self) -> list[Member]:
        with self._lock:
            return list(self._running.values())


def _why(who: str, run: "Future[Any]") -> BaseException:
    error = run.exception()
    return BatonError(f"{who}: ended without being asked") if error is None else labelled(who, error)


def _each(items: "list[Any]", act: Callable[[Any], object], timeout_s: float) -> None:
    """Do the same to all of them at once; what is not done in time goes on in its thread."""
    deadline = Deadline(timeout_s)
    threads = [threading.Thread(target=act, args=(item,), daemon=True) for item in items]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(deadline.left_s())
