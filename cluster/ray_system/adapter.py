"""Baton's processes as Ray actors. The classes it turns into actors are plain Python.

The driver owns every actor and placement group, and none is detached: when the driver ends, for whatever reason, Ray
reaps them all.
"""

import atexit
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import ray
import ray._private.auto_init_hook as ray_auto_init
import ray._private.worker as ray_worker
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from cluster.actors import Actor, Bundle, Demand, Machine, Reservation, describe_capacity
from cluster.processes import Guard, ProcessId, is_alive, kill_all, this_process
from cluster.ray_system.daemons import RayDaemons
from cluster.ray_system.environ import make_temp_dir, tool_environ
from cluster.ray_system.start import first_line, join_ray, start_ray
from cluster.spec.errors import BatonError, PeerUnreachableError, UserError

START_TRIES = 2
SHUTDOWN_S = 8.0
"""Time for Ray's orderly shutdown, which takes about two seconds, or a minute if one of its daemons has died."""
AT_ONCE_S = 0.5
_KILL_S = 5.0

_HEAD_GONE_S = 2.0
_OTHERS_HEAD_GONE_S = 30.0
"""Time for which the head of a joined cluster may be unreachable; Ray's own processes give up after a minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayActor:
    name: str
    title: str
    handle: Any
    node_id: str
    process: "Future[ProcessId]"


@dataclass(frozen=True, slots=True, kw_only=True)
class RayReservation:
    """Placement group with one bundle per actor."""

    group: PlacementGroup = field(repr=False)
    bundles: tuple[Bundle, ...]


class RaySystem:
    """Connection to one Ray cluster, as a context manager that cleans up after itself."""

    def __init__(
        self, namespace: str, address: str | None, num_cpus: int, *, worker_logs: bool, has_dashboard: bool
    ) -> None:
        """Join the cluster at an address, or start one on this machine.

        Ray's environment variables must be set before this module is imported; see ``environ``.

        Args:
            namespace: Ray namespace of the actors' names; a second cluster with the same name finds them there.
            address: for example ``127.0.0.1:6379`` or ``auto``; None starts a cluster.
            num_cpus: number of logical CPUs of a cluster started here; may exceed the machine's.
            worker_logs: True to show the actors' output.
            has_dashboard: True to start Ray's dashboard in a cluster started here.

        Raises:
            UserError: no cluster responds at the address.
            BatonError: Ray took too long to start in every attempt.
        """
        self.temp_dir: Path | None = None
        """Folder for sockets and logs of a cluster started here, accessible only to this account."""
        self.dashboard_url = ""
        """Address of Ray's dashboard; empty if it has none."""
        self.environ: dict[str, str] = {}
        """Environment variables with which Ray's own tools reach the cluster."""
        self.is_urgent = False
        """True if ``shutdown`` should skip Ray's orderly shutdown."""
        self._guard: Guard | None = None
        self._daemons: RayDaemons | None = None
        # A thread that still calls Ray after shutdown must get an error rather than start a new cluster.
        ray_auto_init.enable_auto_connect = False
        ray_worker.print_to_stdstream = _print_to_stdstream if worker_logs else _print_nothing
        common = {"namespace": namespace, "log_to_driver": worker_logs, "logging_level": logging.ERROR}
        try:
            if address:
                self.dashboard_url = join_ray(address, common)
            else:
                self._start_ray(num_cpus, common, has_dashboard)
            if (node := ray_worker._global_node) is not None:
                head_gone_s = _OTHERS_HEAD_GONE_S if address else _HEAD_GONE_S
                self._daemons = RayDaemons(node.gcs_address, node.raylet_socket_name, head_gone_s)
                self.environ = tool_environ(node.gcs_address, self.temp_dir)
        except BaseException:
            self.shutdown()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    @property
    def home(self) -> Machine:
        node_id = ray.get_runtime_context().get_node_id()
        return next(machine for machine in self.machines() if machine.node_id == node_id)

    def machines(self) -> list[Machine]:
        # The public API only reports the sum over all machines.
        free: dict[str, dict[str, float]] = ray._private.state.available_resources_per_node()  # type: ignore[no-untyped-call]
        return [
            Machine(
                node_id=node["NodeID"],
                address=node["NodeManagerAddress"],
                cpus=free.get(node["NodeID"], {}).get("CPU", 0.0),
                gpus=free.get(node["NodeID"], {}).get("GPU", 0.0),
            )
            for node in ray.nodes()  # type: ignore[no-untyped-call]
            if node["Alive"]
        ]

    def taken_names(self) -> list[str]:
        return [str(name) for name in ray.util.list_named_actors()]

    @contextmanager
    def wanting(self, name: str, demand: Demand) -> Iterator[Callable[[float], bool]]:
        """Announce the demand as a pending placement group, which Ray's autoscaler sees and which ends with the
        driver."""
        strategy = "STRICT_PACK" if demand.on_one_machine else "PACK"
        group = placement_group(
            [_resources(demand.cpus, demand.gpus)] * demand.num_bundles, strategy=strategy, name=name
        )
        try:
            yield group.wait
        finally:
            remove_placement_group(group)

    def reserve(self, name: str, bundles: Sequence[Bundle], timeout_s: float) -> RayReservation:
        group = placement_group(
            [_resources(bundle.cpus, bundle.gpus) for bundle in bundles],
            strategy="PACK",
            name=name,
            bundle_label_selector=[{"ray.io/node-id": bundle.node_id} for bundle in bundles],
        )
        if not group.wait(timeout_s):
            remove_placement_group(group)
            known = describe_capacity(bundles, self.machines())
            raise UserError(f"{name}: no capacity within {timeout_s:g} s; {known}")
        return RayReservation(group=group, bundles=tuple(bundles))

    def release(self, reservation: Reservation) -> None:
        assert isinstance(reservation, RayReservation)
        remove_placement_group(reservation.group)

    def start(
        self, kind: type, args: Sequence[object], *, name: str, title: str, bundle: tuple[Reservation, int] | None
    ) -> RayActor:
        node_id, options = self._home_options() if bundle is None else _bundle_options(*bundle)
        remote_class: Any = ray.remote(max_restarts=0, max_task_retries=0)(kind)
        handle = remote_class.options(name=name, **options).remote(*args)
        process = _translated(title, handle.__ray_call__.remote(_process_of).future())
        return RayActor(name=name, title=title, handle=handle, node_id=node_id, process=process)

    def call(self, actor: Actor, method: str, *args: object) -> "Future[Any]":
        assert isinstance(actor, RayActor)
        named = getattr(actor.handle, method).options(name=f"baton {actor.title}")
        return _translated(actor.title, named.remote(*args).future())

    def live(self, actors: Sequence[Actor], timeout_s: float) -> bool:
        asked: Future[bool] = Future()

        def ask() -> None:
            try:
                asked.set_result(all(self._lives(actor) for actor in actors))
            except Exception as error:
                asked.set_exception(error)

        # Ray's own call has no timeout.
        threading.Thread(target=ask, name="ray-ask", daemon=True).start()
        try:
            return asked.result(timeout_s)
        except (RayError, FutureTimeoutError) as exc:
            raise PeerUnreachableError("Ray does not answer") from exc

    def why_lost(self) -> str:
        return self._daemons.why_lost(time.monotonic()) if self._daemons is not None else ""

    def kill(self, actors: Sequence[Actor], timeout_s: float) -> bool:
        by_node: dict[str, list[ProcessId]] = {}
        known = True
        for actor in actors:
            assert isinstance(actor, RayActor)
            try:
                ray.kill(actor.handle, no_restart=True)
            except RayError:  # a stop that waited no longer has left Ray
                return False
            if actor.process.done() and not actor.process.exception():
                by_node.setdefault(actor.node_id, []).append(actor.process.result())
            else:
                known = False
        gone = [self._kill_all(node_id, processes, timeout_s) for node_id, processes in by_node.items()]
        return known and all(gone)

    def shutdown(self) -> None:
        """Leave the cluster; if it was started here, stop it and remove its files. Never blocks for long."""
        timeout_s = AT_ONCE_S if self.is_urgent else SHUTDOWN_S
        leaving = threading.Thread(target=ray.shutdown, name="ray-shutdown", daemon=True)
        leaving.start()
        leaving.join(timeout_s)
        if self._guard is not None:
            self._guard.finish(_KILL_S)
        if leaving.is_alive():
            atexit.unregister(ray_worker.shutdown)  # at exit, it would wait again for daemons that are gone

    def _start_ray(self, num_cpus: int, common: dict[str, Any], has_dashboard: bool) -> None:
        """Start Ray, with one retry: on a busy machine, Ray's daemons may take longer than the 30 s that Ray waits."""
        begun_s = time.monotonic()
        for tries_left in reversed(range(START_TRIES)):
            self.temp_dir = make_temp_dir()
            self._guard = Guard(self.temp_dir)
            try:
                self.dashboard_url = start_ray(
                    num_cpus, self.temp_dir, self._guard, common, has_dashboard=has_dashboard
                )
                return
            except Exception as exc:  # Ray has no exception class for a start timeout
                if not tries_left:
                    raise BatonError(_not_started(exc, time.monotonic() - begun_s)) from exc
                self.shutdown()

    def _home_options(self) -> tuple[str, dict[str, Any]]:
        node_id = ray.get_runtime_context().get_node_id()
        return node_id, {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False)}

    def _lives(self, actor: Actor) -> bool:
        """Return whether an actor lives, according to Ray and, on this machine, to the kernel."""
        assert isinstance(actor, RayActor)
        known: dict[str, Any] = ray._private.state.actors(actor.handle._actor_id.hex())
        is_here = actor.node_id == ray.get_runtime_context().get_node_id()
        process = actor.process.result() if actor.process.done() and not actor.process.exception() else None
        return known.get("State") != "DEAD" and not (is_here and process is not None and not is_alive(process))

    def _kill_all(self, node_id: str, processes: list[ProcessId], timeout_s: float) -> bool:
        """Kill processes on their own machine, because Ray reports an actor as dead before its process has ended."""
        home_id, options = self._home_options()
        if node_id == home_id:
            return kill_all(processes, timeout_s)
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id, soft=False)
        remote_kill: Any = ray.remote(max_retries=0, **options)(kill_all)
        try:
            return bool(ray.get(remote_kill.remote(processes, timeout_s), timeout=timeout_s + 5))
        except RayError:
            return False  # the machine does not respond, so nothing is proven


def _not_started(error: Exception, waited_s: float) -> str:
    waited = f"Ray did not start within {waited_s:.0f} s in {START_TRIES} attempts ({first_line(error)})"
    return f"{waited}; try again when this machine is less busy, or check it with `baton doctor`"


_print_to_stdstream = ray_worker.print_to_stdstream


def _print_nothing(*_: object, **__: object) -> None:
    """Suppress the output of Ray's daemons about a dead worker, which the supervisor reports in one line."""


def _resources(cpus: float, gpus: float) -> dict[str, float]:
    return {key: n for key, n in (("CPU", cpus), ("GPU", gpus)) if n} or {"CPU": 0.001}


def _bundle_options(reservation: Reservation, index: int) -> tuple[str, dict[str, Any]]:
    assert isinstance(reservation, RayReservation)
    bundle = reservation.bundles[index]
    strategy = PlacementGroupSchedulingStrategy(reservation.group, placement_group_bundle_index=index)
    return bundle.node_id, {"num_cpus": bundle.cpus, "num_gpus": bundle.gpus or None, "scheduling_strategy": strategy}


def _process_of(_: object) -> ProcessId:
    return this_process()


def _translated(title: str, theirs: "Future[Any]") -> "Future[Any]":
    """Return a future that raises the actor's own exception, or PeerUnreachableError if its process died."""
    ours: Future[Any] = Future()

    def pass_on(done: "Future[Any]") -> None:
        error = done.exception()
        if error is None:
            ours.set_result(done.result())
        else:
            ours.set_exception(_error(title, error))

    theirs.add_done_callback(pass_on)
    return ours


def _error(title: str, error: BaseException) -> BaseException:
    if isinstance(error, ActorDiedError) and error.args and isinstance(error.args[0], RayTaskError):
        error = error.args[0]  # the constructor raised
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, Exception):
            cause.add_note(str(error))
            return cause
        return BatonError(f"{title}: {first_line(error)}")
    if isinstance(error, OutOfMemoryError):
        return PeerUnreachableError(f"Ray killed the process of {title}, because memory of its machine ran low")
    if isinstance(error, RayError):
        return PeerUnreachableError(f"the process of {title} died")
    return error
