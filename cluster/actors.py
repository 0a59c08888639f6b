"""Interface of the actor system that runs Baton's processes. Tests substitute a fake."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One machine and its free resources."""

    node_id: str
    address: str
    cpus: float
    gpus: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Resources for one actor on one machine."""

    node_id: str
    cpus: float
    gpus: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Identical bundles that are needed, on any machines or all on one."""

    num_bundles: int
    cpus: float
    gpus: float
    on_one_machine: bool


class Reservation(Protocol):
    """Bundles that are reserved and released together."""

    @property
    def bundles(self) -> Sequence[Bundle]:
        """Reserved bundles, in the order requested."""


class Actor(Protocol):
    """Handle to a plain object that runs in its own process."""

    @property
    def name(self) -> str:
        """Name that is unique in the cluster."""


class ActorSystem(Protocol):
    """System that starts processes and calls methods in them. When it ends, so do its processes. Thread-safe."""

    is_urgent: bool
    """True if it should end its processes immediately instead of in an orderly way."""

    @property
    def home(self) -> Machine:
        """Machine that the caller runs on."""

    def machines(self) -> list[Machine]:
        """Return every live machine with its free resources."""

    def wanting(self, name: str, demand: Demand) -> AbstractContextManager[Callable[[float], bool]]:
        """Announce a demand to the autoscaler; yield a function that waits up to a number of seconds until it is met.

        Nothing stays reserved after the context ends.
        """

    def reserve(self, name: str, bundles: Sequence[Bundle], timeout_s: float) -> Reservation:
        """Reserve all of the bundles or none.

        Raises:
            UserError: the bundles do not become free in time; the message names what is wanted and what is free.
        """

    def release(self, reservation: Reservation) -> None:
        """Release the bundles; kill any actor that still occupies one."""

    def start(
        self, kind: type, args: Sequence[object], *, name: str, title: str, bundle: tuple[Reservation, int] | None
    ) -> Actor:
        """Create ``kind(*args)`` in a new process, on a reserved bundle or, without one, on the home machine.

        Return before the object exists. It is never restarted, and its calls run one after another. ``ps`` shows the
        title, such as ``prefill-0 cp1``, during a call.
        """

    def call(self, actor: Actor, method: str, *args: object) -> "Future[Any]":
        """Call a method. The future raises the method's or the constructor's exception, or PeerUnreachableError if
        the process died.
        """

    def live(self, actors: Sequence[Actor], timeout_s: float) -> bool:
        """Return whether all of these processes live, as far as the system knows.

        Raises:
            PeerUnreachableError: the system does not answer in time.
        """

    def why_lost(self) -> str:
        """Return why the system can no longer start and end processes; empty while it can."""

    def kill(self, actors: Sequence[Actor], timeout_s: float) -> bool:
        """Kill processes; return whether all are confirmed dead within the timeout."""


def describe_capacity(bundles: Sequence[Bundle], machines: Sequence[Machine]) -> str:
    """Describe the resources requested and free on each machine, all in one line."""
    parts = []
    for machine in machines:
        here = [bundle for bundle in bundles if bundle.node_id == machine.node_id]
        cpus, gpus = sum(bundle.cpus for bundle in here), sum(bundle.gpus for bundle in here)
        if here:
            free = f"{machine.cpus:g} CPUs and {machine.gpus:g} GPUs"
            parts.append(f"{machine.address}: wanted {cpus:g} CPUs and {gpus:g} GPUs; free: {free}")
    return "; ".join(parts) or "the machines on which it was placed are gone"
