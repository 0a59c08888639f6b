"""Requests that wait for pages, by arrival and priority. Younger ones may overtake the oldest a limited number of
times.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from cluster.spec.ids import Room

LOOKAHEAD = 256
"""Maximum number of waiters examined at once."""


class Waiter(Protocol):
    """Request or sequence without pages."""

    @property
    def room(self) -> Room: ...

    @property
    def priority(self) -> int:
        """Priority; lower values go first."""
        ...

    @property
    def arrival(self) -> int:
        """Arrival number."""
        ...


W = TypeVar("W", bound=Waiter)


class Waiting(Generic[W]):
    """Waiters by arrival and by priority; a preempted one returns to its old position."""

    def __init__(self) -> None:
        self._by_room: dict[Room, W] = {}
        self._by_arrival: list[W] = []
        self._by_priority: list[W] = []
        self._num_passed_pages = 0
        """Number of pages that others took while the oldest waiter needed them."""
        self._in_vain: set[W] = set()
        """Waiters that could not start. They are tried again when ``_num_gains`` or the oldest waiter changes."""
        self._num_gains = 0

    def __len__(self) -> int:
        return len(self._by_arrival)

    def __contains__(self, room: Room) -> bool:
        return room in self._by_room

    def __iter__(self) -> Iterator[W]:
        return iter(self._by_arrival)

    @property
    def oldest(self) -> W | None:
        """Return the waiter that arrived first."""
        return self._by_arrival[0] if self._by_arrival else None

    def add(self, waiter: W) -> None:
        oldest = self.oldest
        self._by_room[waiter.room] = waiter
        insort(self._by_arrival, waiter, key=_arrival)
        insort(self._by_priority, waiter, key=urgency)
        self._spare_anew(oldest)

    def remove(self, room: Room) -> None:
        """Remove a waiter, if present."""
        waiter = self._by_room.pop(room, None)
        if waiter is None:
            return
        oldest = self.oldest
        self._in_vain.discard(waiter)
        del self._by_arrival[bisect_left(self._by_arrival, _arrival(waiter), key=_arrival)]
        del self._by_priority[bisect_left(self._by_priority, urgency(waiter), key=urgency)]
        self._spare_anew(oldest)

    def candidates(self) -> list[W]:
        """Return waiters that may start now: the most urgent ones, and the oldest."""
        first = self._by_priority[:LOOKAHEAD]
        if not first or urgency(self._by_arrival[0]) <= urgency(first[-1]):
            return first
        return [*first, self._by_arrival[0]]

    def untried(self, num_gains: int) -> list[W]:
        """Return candidates that have not failed since ``num_gains`` last changed."""
        in_vain = self._since(num_gains)
        return [waiter for waiter in self.candidates() if waiter not in in_vain]

    def is_in_vain(self, waiter: W, num_gains: int) -> bool:
        """Return whether a waiter has failed to start and no page has become free since."""
        return waiter in self._since(num_gains)

    def note_in_vain(self, waiter: W) -> None:
        """Skip a waiter until something may help it."""
        self._in_vain.add(waiter)

    def may_pass(self, num_pages: int, oldest_pages: int) -> bool:
        """Return whether this many pages may be taken from the oldest waiter, which needs ``oldest_pages``.

        No more pages pass it than it needs itself.
        """
        return num_pages <= self.most_passing(oldest_pages)

    def most_passing(self, oldest_pages: int) -> int:
        """Return the maximum number of pages that may be taken from the oldest waiter, which needs ``oldest_pages``."""
        return max(0, oldest_pages - self._num_passed_pages)

    def note_passed(self, num_pages: int) -> None:
        """Note that pages were taken that the oldest waiter may have to wait for."""
        self._num_passed_pages += num_pages

    def _spare_anew(self, oldest: W | None) -> None:
        if self.oldest is not oldest:
            self._num_passed_pages = 0
            self._in_vain.clear()

    def _since(self, num_gains: int) -> set[W]:
        if num_gains != self._num_gains:
            self._num_gains = num_gains
            self._in_vain.clear()
        return self._in_vain


def _arrival(waiter: Waiter) -> int:
    return waiter.arrival


def urgency(waiter: Waiter) -> tuple[int, int]:
    """Return a sort key: most urgent first, then by arrival."""
    return waiter.priority, waiter.arrival
