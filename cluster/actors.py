"""Interface of the system that runs Baton's processes: machines, reservations, actors. Tests fake it."""

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
class Seat:
    """Resources for one actor on one machine."""

    node_id: str
    cpus: float
    gpus: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Identical seats on any machines."""

    num_seats: int
    cpus: float
    gpus: float
    on_one_machine: bool


class Reservation(Protocol):
    """Seats that are reserved together, until the reservation is released."""

    @property
    def seats(self) -> Sequence[Seat]:
        """Reserved seats, in the order of the request."""


class Actor(Protocol):
    """Plain object in its own process."""

    @property
    def name(self) -> str:
        """Name that is unique in the cluster."""


class ActorSystem(Protocol):
    """Starts processes and calls methods in them. It owns the processes, and none outlives it. Thread-safe."""

    @property
    def home(self) -> Machine:
        """Machine that the caller runs on."""

    def machines(self) -> list[Machine]:
        """Return every live machine with its free resources."""

    def wanting(self, name: str, demand: Demand) -> AbstractContextManager[Callable[[float], bool]]:
        """Announce a demand, so that an autoscaler may add machines; yield a function that waits some seconds for it.

        The announcement reserves nothing beyond the context.
        """

    def reserve(self, name: str, seats: Sequence[Seat], timeout_s: float) -> Reservation:
        """Reserve seats, all or none.

        Raises:
            UserError: the seats are not free in time; the message names what is wanted and what is free.
        """

    def release(self, reservation: Reservation) -> None:
        """Release the seats; kill any actor that still occupies one."""

    def start(self, kind: type, args: Sequence[object], *, name: str, seat: tuple[Reservation, int] | None) -> Actor:
        """Create ``kind(*args)`` in a new process, on a reserved seat or, without one, on the home machine.

        Return before the object exists. It is never restarted, and its calls run one after another.
        """

    def call(self, actor: Actor, method: str, *args: object) -> "Future[Any]":
        """Call a method. The future raises the method's or the constructor's exception, or PeerUnreachableError if
        the process died.
        """

    def kill(self, actors: Sequence[Actor], timeout_s: float) -> bool:
        """Kill processes; return whether all are proven gone within the timeout."""
