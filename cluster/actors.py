"""Interface between launch and the system that runs processes: machines, reservations, actors. Ray in production, a
fake in tests.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One machine and what is free on it."""

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
    """Number of identical seats, on any machines."""

    num_seats: int
    cpus: float
    gpus: float
    on_one_machine: bool


class Reservation(Protocol):
    """Seats reserved together; they stay taken until the reservation is released."""

    @property
    def seats(self) -> Sequence[Seat]:
        """Reserved seats in the order of the request."""
        ...


class Actor(Protocol):
    """One plain object in a process of its own."""

    @property
    def name(self) -> str:
        """Unique among the actors of this cluster."""
        ...


class ActorSystem(Protocol):
    """Starts processes and calls methods in them. Owns everything it starts; nothing outlives it. Thread-safe."""

    @property
    def home(self) -> Machine:
        """The machine that the caller runs on."""
        ...

    def machines(self) -> list[Machine]:
        """Every machine that is alive, with what is free now."""
        ...

    def wanting(self, name: str, demand: Demand) -> AbstractContextManager[Callable[[float], bool]]:
        """Announce a demand for seats, so that an autoscaler may add machines; yields a function that waits some
        seconds for them.

        The announcement reserves nothing: the seats are free once the context ends.
        """
        ...

    def reserve(self, name: str, seats: Sequence[Seat], timeout_s: float) -> Reservation:
        """Reserve seats, all or none.

        Raises:
            UserError: the seats are not available in time; the message names what is wanted and what is free.
        """
        ...

    def release(self, reservation: Reservation) -> None:
        """Release the seats; kills any actor that still occupies one."""
        ...

    def start(self, kind: type, args: Sequence[object], *, name: str, seat: tuple[Reservation, int] | None) -> Actor:
        """Create ``kind(*args)`` in a new process, on a reserved seat or, if it needs no resources, on the home
        machine.

        Returns before the object exists. It is never started twice; its calls run one after another.
        """
        ...

    def call(self, actor: Actor, method: str, *args: object) -> "Future[Any]":
        """Call a method. The future raises what the method or the constructor raised, or PeerUnreachableError
        when the process died."""
        ...

    def kill(self, actors: Sequence[Actor], timeout_s: float) -> bool:
        """Kill processes; True when all are proven gone, False when that could not be established in time."""
        ...
