"""Actor system of threads in this process, and members for it: launcher and supervisor without Ray, ports or torch.

A fake worker derives its answers from its spec. Its leader registers all ranks in the world's table and is ready.
"""

# ruff: noqa: ARG002 - the fakes have the signatures of what they stand for

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from cluster.actors import Actor, Bundle, Demand, Machine, Reservation
from cluster.bootstrap.table import BootstrapTable, records_digest
from cluster.launch.tools import Tools
from cluster.logs import ProcessLog
from cluster.spec.config import DeployConfig
from cluster.spec.errors import PeerLostError, PeerUnreachableError
from cluster.spec.ids import Incarnation, ReplicaId
from cluster.spec.messages import Drain, Message, Resume
from cluster.spec.registry import Heartbeat, RankRecord, ReplicaLoad, TableSnapshot
from cluster.spec.worker_spec import Rendezvous, RouterShare, WorkerSpec
from tests.fakes.rank_records import make_record

_AT_ONCE_S = 10.0
"""Time in which all routers must reach the barrier."""
HOME = Machine(node_id="home", address="10.0.0.1", cpus=64.0, gpus=0.0)


@dataclass(eq=False)
class FakeActor:
    """One object and the thread that runs its calls."""

    name: str
    thing: Any = None
    calls: "queue.SimpleQueue[Callable[[], None]]" = field(default_factory=queue.SimpleQueue)
    open: "list[Future[Any]]" = field(default_factory=list)
    alive: bool = True

    def serve(self) -> None:
        while True:
            self.calls.get()()

    def die(self) -> None:
        """Die as from SIGKILL."""
        self.alive = False
        for call in list(self.open):
            if not call.done():
                call.set_exception(PeerUnreachableError(f"the process of {self.name} died"))


@dataclass(frozen=True, eq=False)
class FakeReservation:
    """Placement group that is never refused."""

    name: str
    bundles: Sequence[Bundle]


class FakeSystem:
    """Fake actor system. ``log`` lists the calls in order."""

    def __init__(self, machines: Sequence[Machine] = (HOME,)) -> None:
        self._machines = list(machines)
        self.joining: list[Machine] = []
        """Machines that join one by one while somebody needs more."""
        self.actors: dict[str, FakeActor] = {}
        self.reserved: list[FakeReservation] = []
        self.log: list[str] = []
        self.is_urgent = False

    @property
    def home(self) -> Machine:
        return self._machines[0]

    def machines(self) -> list[Machine]:
        return self._machines

    @contextmanager
    def wanting(self, name: str, demand: Demand) -> Iterator[Callable[[float], bool]]:
        def wait(_: float) -> bool:
            if self.joining:
                self._machines.append(self.joining.pop(0))
            return not self.joining

        self.log.append(f"want {demand.num_bundles} bundles")
        yield wait
        self.log.append("want nothing")

    def reserve(self, name: str, bundles: Sequence[Bundle], timeout_s: float) -> FakeReservation:
        reservation = FakeReservation(name, tuple(bundles))
        self.reserved.append(reservation)
        return reservation

    def release(self, reservation: Reservation) -> None:
        assert isinstance(reservation, FakeReservation)
        self.reserved.remove(reservation)

    def start(
        self, kind: type, args: Sequence[object], *, name: str, title: str, bundle: tuple[Reservation, int] | None
    ) -> FakeActor:
        assert name not in self.actors, f"two actors named {name}"
        assert bundle is None or bundle[0] in self.reserved
        actor = self.actors[name] = FakeActor(name)
        self.log.append(f"start {name}")
        actor.calls.put(lambda: setattr(actor, "thing", kind(*args)))
        threading.Thread(target=actor.serve, daemon=True).start()
        return actor

    def call(self, actor: Actor, method: str, *args: object) -> "Future[Any]":
        assert isinstance(actor, FakeActor)
        done: Future[Any] = Future()
        self.log.append(f"{method} {actor.name}")
        actor.open.append(done)
        if actor.alive:
            actor.calls.put(lambda: _settle(done, lambda: getattr(actor.thing, method)(*args)))
        else:
            actor.die()
        return done

    def kill(self, actors: Sequence[Actor], timeout_s: float) -> bool:
        for actor in actors:
            assert isinstance(actor, FakeActor)
            self.log.append(f"kill {actor.name}")
            actor.die()
        return True

    def live(self, actors: Sequence[Actor], timeout_s: float) -> bool:
        return all(isinstance(actor, FakeActor) and actor.alive for actor in actors)

    def why_lost(self) -> str:
        return ""

    def living(self, prefix: str) -> list[FakeActor]:
        """Return the living actors whose names have a prefix."""
        return [actor for name, actor in self.actors.items() if actor.alive and name.startswith(prefix)]


class World:
    """Table, addresses and failures shared by fake members."""

    def __init__(self, system: FakeSystem | None = None) -> None:
        self.system = system or FakeSystem()
        self.table = BootstrapTable(lease_s=3600.0)
        self.bootstrap_up = True
        self.stages: list[tuple[str, str]] = []
        self.fetch_s = 0.0
        """Time until a worker's machine has the model."""
        self.load_errors: dict[tuple[str, int], Exception] = {}
        """Errors from loading, by replica and global rank."""
        self.run_errors: dict[tuple[str, int], Exception] = {}
        """Errors from running, by replica and global rank. Errors that are consequences come before their cause."""
        self.drains = True
        """Whether the router's open requests end in time."""
        self.num_open = 0
        """Requests that a replica reports when it begins to drain."""
        self.num_commands = self.num_lost = 0
        """Drain and resume messages so far, and how many of the first are lost."""
        self.beats: dict[str, Heartbeat] = {}
        """Heartbeat of each running replica, by leader address."""
        self.rendezvous: list[Rendezvous] = []
        self.router_ports: list[int] = []
        """Ports with which routers were started."""
        self.routers_at_once = threading.Barrier(1)
        """Barrier at which routers with a port wait while they start."""
        self._ends: dict[str, threading.Event] = {}
        self._lock = threading.Lock()

    def tools(self) -> Tools:
        """Return everything that a Launcher needs."""
        return Tools(
            system=self.system,
            progress=lambda member, stage: self.stages.append((member, stage)),
            worker=_bound(FakeWorker, self),
            router=_bound(FakeRouter, self),
            bootstrap=_bound(FakeBootstrap, self),
            send=self.deliver,
            connect=lambda _: FakeTable(self),
        )

    def deliver(self, addresses: Sequence[str], message: Message) -> None:
        for address in addresses:
            if address in self.beats and isinstance(message, Drain | Resume):
                self.num_commands += 1
                if self.num_commands <= self.num_lost:
                    continue
                load = ReplicaLoad(draining=isinstance(message, Drain), num_running=self.num_open)
                self.table.heartbeat(replace(self.beats[address], load=load), now_s=0.0)
            else:
                self.end_of(address).set()

    def end_of(self, address: str) -> threading.Event:
        """Return an event that is set once the process at the address is shut down."""
        with self._lock:
            return self._ends.setdefault(address, threading.Event())


class FakeTable:
    """Table of the world without HTTP."""

    def __init__(self, world: World) -> None:
        self._world = world

    def watch(self, version: int, timeout_s: float) -> TableSnapshot | None:
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            if not self._world.bootstrap_up:
                raise PeerUnreachableError("the bootstrap service does not answer")
            if self._world.table.version != version:
                return self._world.table.snapshot(now_s=0.0)
            time.sleep(0.002)
        return None

    def unregister(self, replica: ReplicaId, incarnation: Incarnation, reaped: bool) -> None:
        self._world.table.unregister(replica, incarnation, reaped=reaped)

    def close(self) -> None:
        self._world.system.log.append("close table")


class FakeWorker:
    def __init__(self, world: World, log: ProcessLog, environ: Mapping[str, str]) -> None:
        self._world = world

    def fetch(self, model: str) -> None:
        time.sleep(self._world.fetch_s)

    def build(self, spec: WorkerSpec, rendezvous: Rendezvous) -> None:
        self._spec = spec
        self._world.rendezvous.append(rendezvous)

    def open_store(self) -> str:
        assert self._spec.is_leader
        return f"{self._spec.host}:1"

    def load(self, store: str) -> RankRecord:
        error = self._world.load_errors.get((self._spec.replica, self._spec.global_rank))
        if error is not None:
            raise error
        spec = self._spec
        return make_record(spec.replica, spec.global_rank, spec.sizes, spec.incarnation)

    def run(self, records: list[RankRecord]) -> None:
        record = records[self._spec.global_rank]
        error = self._world.run_errors.get((self._spec.replica, self._spec.global_rank))
        if error is not None:
            if not isinstance(error, PeerLostError):
                time.sleep(0.05)
            raise error
        if self._spec.is_leader:
            for each in records:
                self._world.table.register(each)
            beat = Heartbeat(
                replica=record.replica,
                incarnation=record.incarnation,
                records_digest=records_digest(records),
                load=ReplicaLoad(),
            )
            self._world.table.heartbeat(beat, now_s=0.0)
            self._world.beats[record.address] = beat
        self._world.end_of(record.address).wait()


class FakeRouter:
    def __init__(
        self, world: World, log: ProcessLog, environ: Mapping[str, str], incarnation: Incarnation, share: RouterShare
    ) -> None:
        self._world = world
        self._control = f"{share.name}-control"

    def start(self, config: DeployConfig, model: str, rendezvous: Rendezvous, host: str) -> tuple[str, str]:
        self._world.rendezvous.append(rendezvous)
        self._world.router_ports.append(config.router.port)
        if config.router.port:
            self._world.routers_at_once.wait(_AT_ONCE_S)
        url = f"http://{host}:{config.router.port or 4000}"
        return url, self._control

    def run(self) -> bool:
        self._world.end_of(self._control).wait()
        return self._world.drains


class FakeBootstrap:
    def __init__(self, world: World, log: ProcessLog, environ: Mapping[str, str]) -> None:
        self._world = world

    def start(self, host: str, port: int, token: str) -> str:
        return f"http://{host}:{port or 3000}"

    def run(self) -> None:
        self._world.end_of("bootstrap").wait()


def _bound(kind: type, world: World) -> type:
    return type(kind.__name__, (kind,), {"__init__": lambda self, *args: kind.__init__(self, world, *args)})  # type: ignore[misc]


def _settle(done: "Future[Any]", act: Callable[[], Any]) -> None:
    try:
        result = act()
    except Exception as error:
        if not done.done():
            done.set_exception(error)
        return
    if not done.done():
        done.set_result(result)
