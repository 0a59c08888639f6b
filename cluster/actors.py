"""What launch asks of whatever runs processes: machines, reservations, actors. Ray in production, a fake in tests."""

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
    """Seats, all alike, on whatever machines."""

    num_seats: int
    cpus: float
    gpus: float
    on_one_machine: bool


class Reservation(Protocol):
    """Seats held together; they stay taken until the reservation is released."""

    @property
    def seats(self) -> Sequence[Seat]:
        """In the order in which they were asked for."""
        ...


class Actor(Protocol):
    """One plain object in a process of its own."""

    @property
    def name(self) -> str:
        """Unique among the actors of this cluster."""
        ...


class ActorSystem(Protocol):
    """Starts processes and calls methods in them. Owns all it started; nothing outlives it. Safe from any thread."""

    @property
    def home(self) -> Machine:
        """The machine that the caller runs on."""
        ...

    def machines(self) -> list[Machine]:
        """Every machine that is alive, with what is free now."""
        ...

    def wanting(self, name: str, demand: Demand) -> AbstractContextManager[Callable[[float], bool]]:
        """Let it be known that seats are wanted, so that machines may be added; yields a wait of some seconds for them.

        They are nobody's afterwards.
        """
        ...

    def reserve(self, name: str, seats: Sequence[Seat], timeout_s: float) -> Reservation:
        """Take seats, all or none.

        Raises:
            UserError: they are not to be had in time; says what is wanted and what is there.
        """
        ...

    def release(self, reservation: Reservation) -> None:
        """Give seats back; kills whoever still sits there."""
        ...

    def start(self, kind: type, args: Sequence[object], *, name: str, seat: tuple[Reservation, int] | None) -> Actor:
        """Make ``kind(*args)`` in a new process, on a reserved seat or, needing no resources, at home.

        Returns before the object exists. It is never started twice; its calls run one after the other.
        """
        ...

    def call(self, actor: Actor, method: str, *args: object) -> "Future[Any]":
        """Call a method. The future raises what the method or the constructor raised, or PeerUnreachableError
        when the process died."""
        ...

    def kill(self, actors: Sequence[Actor], timeout_s: float) -> bool:
        """Kill processes; True when all of them are proven gone, False when that could not be seen in time."""
        ...
