"""A prefill and a decode worker, real down to the model, in threads of this process, that can be held at any point."""

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx

from cluster.channel import Outbox
from cluster.spec.config import DeployConfig
from cluster.spec.ids import Incarnation, Room
from cluster.spec.lifecycle import Role
from cluster.spec.messages import Message, TableUpdate
from cluster.spec.registry import ReplicaEntry, ReplicaLoad, TableSnapshot
from cluster.spec.step_messages import StepPlan
from cluster.spec.worker_spec import Rendezvous, WorkerSpec
from router.server import RouterServer
from tests.fakes.bootstrap import FakeTable
from tests.fakes.router_cluster import wait_ready
from tests.fakes.worker_specs import lone_worker
from workers import worker as worker_module
from workers.build import make_kv_sender, make_leader
from workers.handoff.kv_sender import KvSender
from workers.worker import Worker

_HOST = "127.0.0.1"
_SHOW_S = 60.0


class HeldLeader:
    """A real leader whose steps, or whose messages of some kinds, wait as long as they are held."""

    def __init__(self, leader: Any) -> None:
        self.real = leader
        self.num_steps_allowed: int | None = None
        """Further steps; None for any number."""
        self.kept_kinds: tuple[type, ...] = ()
        """Messages that are kept back."""
        self.tables: queue.SimpleQueue[TableSnapshot] = queue.SimpleQueue()
        """Those it has been shown."""
        self._kept: list[Message] = []

    @property
    def requests(self) -> dict[Room, Any]:
        """Of its one DP rank."""
        requests: dict[Room, Any] = self.real._leaders[0]._requests
        return requests

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def on_message(self, message: Message, now_s: float) -> None:
        if isinstance(message, self.kept_kinds):
            self._kept.append(message)
        else:
            self.real.on_message(message, now_s)
            if isinstance(message, TableUpdate):
                self.tables.put(message.snapshot)

    def tick(self, now_s: float) -> None:
        if not self.kept_kinds:
            kept, self._kept = self._kept, []
            for message in kept:
                self.real.on_message(message, now_s)
        self.real.tick(now_s)

    def has_work(self) -> bool:
        return self.num_steps_allowed != 0 and self.real.has_work()

    def next_plans(self) -> list[StepPlan]:
        plans: list[StepPlan] = self.real.next_plans() if self.num_steps_allowed != 0 else []
        if plans and self.num_steps_allowed is not None:
            self.num_steps_allowed -= 1
        return plans

    def count(self, state: str) -> int:
        """Requests in a state of the leader's own."""
        return sum(request.state.value == state for request in list(self.requests.values()))


class HeldWriter:
    """A transfer backend whose writes wait while ``flow`` is clear."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.flow = threading.Event()
        self.flow.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def write(self, *args: Any) -> None:
        self.flow.wait()
        self._backend.write(*args)


class HeldEngine:
    """One replica of each role."""

    def __init__(self, config: DeployConfig, model_folder: Path) -> None:
        self.leaders: dict[Role, HeldLeader] = {}
        self._senders: dict[Role, KvSender] = {}
        self._workers = {role: Worker(lone_worker(config, role), model_folder, None) for role in Role}
        self._rows = {role: [worker.load(worker.open_store())] for role, worker in self._workers.items()}
        prefill = self._workers[Role.PREFILL]
        assert prefill._rank is not None
        self.writer = HeldWriter(prefill._rank.backend)
        prefill._rank = replace(prefill._rank, backend=self.writer)
        self._threads = [
            threading.Thread(target=worker.run, args=[self._rows[role]], name=role.value)
            for role, worker in self._workers.items()
        ]
        self._outbox = Outbox()

    @contextmanager
    def running(self) -> Iterator["HeldEngine"]:
        """Both workers work, and each knows the other."""
        come = threading.Semaphore(0)

        def make_held(spec: WorkerSpec, *args: Any) -> HeldLeader:
            held = self.leaders[spec.role] = HeldLeader(make_leader(spec, *args))
            come.release()
            return held

        def make_known(spec: WorkerSpec, *args: Any) -> KvSender:
            sender = self._senders[spec.role] = make_kv_sender(spec, *args)
            return sender

        with (
            patch.object(worker_module, "make_leader", make_held),
            patch.object(worker_module, "make_kv_sender", make_known),
        ):
            for thread in self._threads:
                thread.start()
            for _ in self._threads:
                come.acquire()
        try:
            for role in Role:
                self.show(role, self.table())
            yield self
        finally:
            self.writer.flow.set()
            for worker in self._workers.values():
                worker.stop("test over")
            for thread in self._threads:
                thread.join()
            for worker in self._workers.values():
                worker.close()
            self._outbox.close()

    @contextmanager
    def served(self, config: DeployConfig, model_folder: Path) -> Iterator[httpx.Client]:
        """While both work: clients of a router over them."""
        table, rendezvous = FakeTable(), Rendezvous(bootstrap_url="http://x", token="x")
        server = RouterServer(config, model_folder, rendezvous, _HOST, Incarnation(1), watch=table.watch)
        table.show(self.table())
        try:
            with httpx.Client(base_url=server.start(), timeout=60.0, trust_env=False) as http:
                wait_ready(http)
                yield http
        finally:
            server.stop()
        server.run()

    def table(self, *roles: Role) -> TableSnapshot:
        """The replicas of these roles; all by default."""
        entries = [
            ReplicaEntry(
                replica=rows[0].replica,
                role=role,
                incarnation=rows[0].incarnation,
                ready=True,
                rows=tuple(rows),
                load=ReplicaLoad(),
            )
            for role, rows in self._rows.items()
            if role in (roles or Role)
        ]
        return TableSnapshot(version=1, replicas=tuple(entries), reaped={})

    def send(self, role: Role, message: Message) -> None:
        """To a leader."""
        self._outbox.send(self._rows[role][0].address, message)

    def show(self, role: Role, table: TableSnapshot) -> None:
        """Tell a leader what the table is; it knows when this returns."""
        self.send(role, TableUpdate(snapshot=table))
        assert self.leaders[role].tables.get(timeout=_SHOW_S) == table

    def release(self) -> None:
        """Hold nothing any more."""
        for role, leader in self.leaders.items():
            leader.num_steps_allowed, leader.kept_kinds = None, ()
            self.show(role, self.table())
        self.writer.flow.set()

    @property
    def leftovers(self) -> str:
        """What is left of any request on either side: pages, rooms, tickets, transfers; empty for nothing."""
        found = []
        for role, leader in self.leaders.items():
            allocator = leader.real._leaders[0]._allocator
            if allocator.num_free != allocator.num_pages:
                found.append(f"{role} holds {allocator.num_pages - allocator.num_free} pages")
            if not leader.real._leaders[0].is_idle():
                found.append(f"{role} knows {len(leader.requests)} requests, or tickets without one")
            if num_open := self._senders[role].num_open:
                found.append(f"{role} has {num_open} open transfers")
        return ", ".join(found)

    def check_integrity(self) -> None:
        """Of both leaders, while nothing happens."""
        for leader in self.leaders.values():
            leader.real._leaders[0].check_integrity()
