"""Those that wait for pages, in the order in which they came; and what the first of them is spared."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from cluster.spec.ids import Room

LOOKAHEAD = 256
"""Most that are looked at at once, however many wait."""


class Waiter(Protocol):
    """A request or a sequence without pages."""

    @property
    def room(self) -> Room:
        """What it is told apart by."""
        ...

    @property
    def priority(self) -> int:
        """Lower values have their turn earlier."""
        ...

    @property
    def arrival(self) -> int:
        """Its number in the order of coming."""
        ...


W = TypeVar("W", bound=Waiter)


class Waiting(Generic[W]):
    """A retracted sequence comes back to where it was."""

    def __init__(self) -> None:
        self._by_room: dict[Room, W] = {}
        self._by_arrival: list[W] = []
        self._by_priority: list[W] = []
        self._num_passed_pages = 0
        """Pages that others took though the oldest one may have to wait for them."""

    def __len__(self) -> int:
        return len(self._by_arrival)

    def __iter__(self) -> Iterator[W]:
        return iter(self._by_arrival)

    @property
    def oldest(self) -> W | None:
        """The first to come."""
        return self._by_arrival[0] if self._by_arrival else None

    def add(self, waiter: W) -> None:
        """Take one in."""
        oldest = self.oldest
        self._by_room[waiter.room] = waiter
        insort(self._by_arrival, waiter, key=_arrival)
        insort(self._by_priority, waiter, key=_turn)
        self._spare_anew(oldest)

    def remove(self, room: Room) -> None:
        """Forget one, if it waits."""
        waiter = self._by_room.pop(room, None)
        if waiter is None:
            return
        oldest = self.oldest
        del self._by_arrival[bisect_left(self._by_arrival, _arrival(waiter), key=_arrival)]
        del self._by_priority[bisect_left(self._by_priority, _turn(waiter), key=_turn)]
        self._spare_anew(oldest)

    def candidates(self) -> list[W]:
        """Those that may have their turn now: the first by priority, and the oldest."""
        first = self._by_priority[:LOOKAHEAD]
        return first if not first or self.oldest in first else [*first, self._by_arrival[0]]

    def may_pass(self, num_pages: int, oldest_pages: int) -> bool:
        """Whether so many pages may be taken from the oldest one, which waits for ``oldest_pages``.

        No more pages pass it than it wants itself.
        """
        return num_pages == 0 or self._num_passed_pages + num_pages <= oldest_pages

    def note_passed(self, num_pages: int) -> None:
        """So many pages were taken that the oldest one may have to wait for."""
        self._num_passed_pages += num_pages

    def _spare_anew(self, oldest: W | None) -> None:
        if self.oldest is not oldest:
            self._num_passed_pages = 0


def _arrival(waiter: Waiter) -> int:
    return waiter.arrival


def _turn(waiter: Waiter) -> tuple[int, int]:
    return waiter.priority, waiter.arrival
