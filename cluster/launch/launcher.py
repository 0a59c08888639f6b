"""Launcher, which starts and ends a cluster's members (bootstrap service, routers, replicas) for the supervisor.

All processes start together. Once the bootstrap service responds, the router starts to serve while each replica joins
its groups, loads the model and registers.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from cluster.actors import Machine
from cluster.launch.gang import Gang
from cluster.launch.services import BOOTSTRAP, BootstrapProcess, RouterProcess, follow_router
from cluster.launch.tools import Tools
from cluster.launch.waits import LAST_WORDS_S, Capacity, Deadline, await_capacity, labelled
from cluster.placement import ReplicaPlacement, place
from cluster.processes import this_process
from cluster.spec.config import DeployConfig, TransferBackendName
from cluster.spec.errors import BatonError, PeerLostError
from cluster.spec.ids import Incarnation, ReplicaId
from cluster.spec.worker_spec import Rendezvous, RouterShare, router_shares

LOOPBACK = "127.0.0.1"
STOP_S = 5.0
"""Time for workers to end by themselves before they are killed."""
KILL_S = 5.0
"""Time for the kernel to end killed processes."""
AT_ONCE_S = 0.5
"""Kill timeout after a second stop signal; stopping the Ray cluster ends the remaining processes."""
ASK_S = 5.0
"""Maximum wait for the actor system to answer whether processes live."""
GRACE_S = 2.0
"""Additional time for calls to Ray, because a dead Ray cluster never responds."""

OnEnded = Callable[[str, Incarnation, BaseException], None]
"""Callback (member, incarnation, reason) for every process that ends."""
LaunchedMember = BootstrapProcess | RouterProcess | Gang
"""One incarnation of a member. While its ``runs`` are empty, no other process knows of it."""


class Launcher:
    """All members of one cluster. Methods may run in one thread per member."""

    def __init__(self, tools: Tools, config: DeployConfig, model: str, token: str, on_ended: OnEnded) -> None:
        """Place the replicas.

        Args:
            model: path or repository, which every process resolves on its own machine.

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
        """True if the cluster uses loopback, which a machine that joins later cannot reach."""
        self._placements = {placement.replica: placement for placement in place(config, machines)}
        self._hosts = {m.node_id: LOOPBACK if self._is_alone else m.address for m in machines}
        self._home_host = self._hosts[tools.system.home.node_id]
        self._lock = threading.Lock()
        self._running: dict[str, LaunchedMember] = {}
        self._unproven: dict[tuple[str, Incarnation], LaunchedMember] = {}
        """Ended members whose processes may still be alive."""
        self._lost: dict[tuple[str, Incarnation], set[str]] = {}
        """Machines on which a member may still run, because Ray reports a lost machine late."""
        self._crowded_out: set[ReplicaId] = set()
        """Replicas whose last start did not get the resources of their placement."""
        self.rendezvous: Future[Rendezvous] = Future()
        """Address of the bootstrap service and more, set once it has started. Restarts do not change it."""
        self._bootstrap_port = 0
        self._port_lock = threading.Lock()
        """Lock held while a router process picks the port. Once that is known, router processes start in parallel."""
        self.routers: dict[str, RouterShare] = {share.name: share for share in router_shares(config.router.processes)}
        self._router_addresses: dict[str, str] = {}
        """Channel address of each router process; during a restart, the previous one."""
        self.router_url = ""
        """Base URL of the endpoint; empty before the router has started."""

    @property
    def names(self) -> list[str]:
        return [BOOTSTRAP, *self.routers, *self._placements]

    def follow_router(self, name: str, on_seen: Callable[[bool], None]) -> None:
        """Report whether a router process responds, as ``services.follow_router`` does. Never returns."""
        follow_router(lambda: self._router_addresses[name], self._home_host, self._tools.channel_key, on_seen)

    def start(self, name: str, incarnation: Incarnation) -> None:
        """Start a member; return once it is ready. Later, report each of its processes that ends to ``on_ended``.

        Raises:
            BatonError: the member did not start; the caller ends it.
        """
        deadline = Deadline(self._config.resources.start_timeout_s)
        if name == BOOTSTRAP:
            self._start_bootstrap(incarnation, deadline)
        elif name in self.routers:
            self._start_router(self.routers[name], incarnation, deadline)
        else:
            self._start_gang(ReplicaId(name), incarnation)
        self._tools.progress(name, "ready")
        for who, run in self._running[name].runs.items():
            run.add_done_callback(partial(self._report_end, name, incarnation, who))

    def lives(self, name: str) -> bool:
        """Return whether all processes of a running member live.

        Raises:
            PeerUnreachableError: the actor system does not answer.
        """
        member = self._running.get(name)
        return member is not None and member.lives(ASK_S)

    def end(self, name: str, incarnation: Incarnation) -> bool:
        """Kill a member and release its resources; return whether its processes are confirmed dead."""
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
        """Retry the kill from ``end``; return whether the member can no longer write anywhere.

        A member can no longer write once its processes are confirmed dead, or if no other process ever knew of it.
        """
        member = self._unproven[name, incarnation]
        if not member.kill(KILL_S) and member.runs:
            return False
        del self._unproven[name, incarnation]
        self._lost.pop((name, incarnation), None)
        return True

    def mark_ended(self, replica: ReplicaId, incarnation: Incarnation, *, proven: bool) -> None:
        """Report an incarnation's end to the rank table; ``proven`` means that no process is left.

        Raises:
            PeerUnreachableError: the bootstrap service does not respond.
        """
        with closing(self._tools.connect(self.rendezvous.result())) as table:
            table.unregister(replica, incarnation, reaped=proven)

    def place(self, names: Sequence[str], wait_s: float = 0.0) -> None:
        """Place new replicas. First wait for joining machines if they can be used.

        Raises:
            ConfigError: the replicas do not fit on the machines.
        """
        replicas = [ReplicaId(name) for name in names]
        if wait_s and not self._is_alone and self._config.transfer.backend is not TransferBackendName.SHARED_MEMORY:
            capacity = Capacity(config=self._config, machines=self._usable_machines, only=replicas)
            await_capacity(self._tools.system, capacity, wait_s, partial(self._tools.progress, "scale"), lambda: None)
        machines = self._usable_machines()
        self._hosts |= {m.node_id: m.address for m in machines if m.node_id not in self._hosts}
        placements = place(self._config, machines, replicas)
        self._placements |= {placement.replica: placement for placement in placements}

    def drain_replica(self, name: str, grace_s: float | None) -> bool:
        timeout_s = self._config.router.drain_s if grace_s is None else grace_s
        gang = self._running.get(name)
        return isinstance(gang, Gang) and gang.drain(self.rendezvous.result(), timeout_s)

    def resume_replica(self, name: str) -> bool:
        gang = self._running.get(name)
        return isinstance(gang, Gang) and gang.resume(self.rendezvous.result())

    def drain(self) -> bool:
        """Let routers finish open requests and replicas store their pages; return whether all requests finished.

        Pages that are not stored in time are lost, which affects no request.
        """
        deadline = Deadline(self._config.router.drain_s)
        routers = [member for member in self._snapshot() if isinstance(member, RouterProcess)]
        for router in routers:
            router.begin_drain()
        # A list, not a generator: all() must not stop at the first router that fails.
        drained = [router.wait_drained(deadline.left_s()) for router in routers]
        if self._config.hicache.is_stored:
            meeting = self.rendezvous.result()
            gangs = [member for member in self._snapshot() if isinstance(member, Gang) and member.runs]
            _each(gangs, lambda gang: gang.drain(meeting, deadline.left_s()), deadline.left_s())
        return all(drained)

    def stop(self) -> None:
        """Ask the workers to end, then kill the remaining processes."""
        gangs = [member for member in self._snapshot() if isinstance(member, Gang)]
        _each(gangs, lambda gang: gang.stop(STOP_S), STOP_S + GRACE_S)
        self._kill(KILL_S + GRACE_S)

    def kill(self) -> None:
        self._kill(AT_ONCE_S)

    def _kill(self, timeout_s: float) -> None:
        """Kill all members; return in time even if Ray does not respond."""
        _each(self._snapshot(), lambda member: member.kill(min(KILL_S, timeout_s)), timeout_s)

    def _start_bootstrap(self, incarnation: Incarnation, deadline: Deadline) -> None:
        process = BootstrapProcess(self._tools, incarnation, self._config.log)
        self._keep(BOOTSTRAP, process)
        try:
            url = process.start(self._home_host, self._bootstrap_port, self._token, deadline)
        except BatonError as error:
            if not self.rendezvous.done():
                self.rendezvous.set_exception(error)
            raise
        self._bootstrap_port = urlsplit(url).port or 0
        if not self.rendezvous.done():
            key, started = self._tools.channel_key, time.time() - this_process().age_s
            meeting = Rendezvous(bootstrap_url=url, token=self._token, channel_key=key, started=started)
            self.rendezvous.set_result(meeting)

    def _start_router(self, share: RouterShare, incarnation: Incarnation, deadline: Deadline) -> None:
        process = RouterProcess(self._tools, incarnation, share, self._config.log)
        self._keep(share.name, process)
        meeting = self.rendezvous.result()
        with self._port_lock:
            if not self._config.router.port:  # this one picks the port for the others, and for those that restart
                self._serve_router(share.name, process, meeting, deadline)
                router = self._config.router.model_copy(update={"port": urlsplit(self.router_url).port})
                self._config = self._config.model_copy(update={"router": router})
                return
        self._serve_router(share.name, process, meeting, deadline)

    def _serve_router(self, name: str, process: RouterProcess, meeting: Rendezvous, deadline: Deadline) -> None:
        self.router_url = process.start(self._config, self._model, meeting, self._home_host, deadline)
        self._router_addresses[name] = process.address

    def _start_gang(self, replica: ReplicaId, incarnation: Incarnation) -> None:
        placement = self._living_placement(replica)
        hosts = [self._hosts[bundle.node_id] for bundle in placement.bundles]
        gang = Gang(self._tools, self._config, placement, incarnation, hosts)
        self._keep(replica, gang)
        try:
            gang.start(self._model, self.rendezvous.result)
        finally:
            if not gang.has_bundles:
                self._crowded_out.add(replica)

    def _living_placement(self, replica: ReplicaId) -> ReplicaPlacement:
        """Return a replica's placement, or a new one if a machine is lost or its resources are taken.

        Raises:
            ConfigError: the replica does not fit on the machines.
        """
        usable = {machine.node_id for machine in self._usable_machines()}
        is_lost = any(bundle.node_id not in usable for bundle in self._placements[replica].bundles)
        if is_lost or replica in self._crowded_out:
            self.place([replica])
            self._crowded_out.discard(replica)
        return self._placements[replica]

    def _away_from_home(self, name: str) -> set[str]:
        """Return a replica's machines other than the home machine, which cannot be lost; empty for a service."""
        placement = self._placements.get(ReplicaId(name))
        bundles = placement.bundles if placement is not None else ()
        return {bundle.node_id for bundle in bundles} - {self._tools.system.home.node_id}

    def _usable_machines(self) -> list[Machine]:
        """Return the live machines for replicas; with shared memory, only the machine of the other replicas."""
        lost = {node_id for node_ids in self._lost.values() for node_id in node_ids}
        machines = [machine for machine in self._tools.system.machines() if machine.node_id not in lost]
        if self._config.transfer.backend is TransferBackendName.SHARED_MEMORY:
            used = {bundle.node_id for placement in self._placements.values() for bundle in placement.bundles}
            return [machine for machine in machines if machine.node_id in used]
        return [machine for machine in machines if machine.node_id in self._hosts or not self._is_alone]

    def _report_end(self, name: str, incarnation: Incarnation, who: str, run: "Future[Any]") -> None:
        error = run.exception()
        reason = BatonError(f"{who}: ended unexpectedly") if error is None else labelled(who, error)
        report = partial(self._on_ended, name, incarnation, reason)
        if not isinstance(error, PeerLostError):
            report()
            return
        # Another process ended first and reports the cause. Report this end later, in case that report never comes.
        timer = threading.Timer(LAST_WORDS_S, report)
        timer.daemon = True
        timer.start()

    def _keep(self, name: str, member: LaunchedMember) -> None:
        with self._lock:
            self._running[name] = member

    def _snapshot(self) -> list[LaunchedMember]:
        with self._lock:
            return list(self._running.values())


def _each(items: "list[Any]", act: Callable[[Any], object], timeout_s: float) -> None:
    """Act on all items in parallel; after the timeout, unfinished threads continue in the background."""
    deadline = Deadline(timeout_s)
    threads = [threading.Thread(target=act, args=(item,), daemon=True) for item in items]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(deadline.left_s())
