"""Queue that gives every tenant its share. Sans I/O."""

import heapq
import itertools
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")


class _Entry(msgspec.Struct, Generic[T], order=True, frozen=True):
    priority: int
    begin: float
    number: int
    tenant: str
    length: float
    """Virtual time that the item takes."""
    item: T


class FairQueue(Generic[T]):
    """Queue ordered by priority, then fairly among tenants, then by arrival.

    Start-time fair queueing (Goyal, Vin and Cheng, 1996): tenants are served in proportion to their weights, however
    many items each of them adds. A tenant that was idle is served at once, but has saved nothing up.
    """

    def __init__(self) -> None:
        self._entries: list[_Entry[T]] = []
        self._numbers = itertools.count()
        self._now = 0.0
        """Virtual time: the latest begin of an item taken."""
        self._end_of: dict[str, float] = {}
        """Virtual time at which each tenant's newest item ends."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[T]:
        return (entry.item for entry in self._entries)

    @property
    def first(self) -> T:
        return self._entries[0].item

    def push(self, item: T, tenant: str, cost: float, weight: float = 1.0, priority: int = 0) -> None:
        """Add an item. ``cost`` is the work that it takes, in any unit that all items of the queue share."""
        begin, length = max(self._now, self._end_of.get(tenant, 0.0)), cost / weight
        self._end_of[tenant] = begin + length
        heapq.heappush(self._entries, _Entry(priority, begin, next(self._numbers), tenant, length, item))

    def pop(self) -> T:
        first = self.first
        self.take(first)
        return first

    def remove(self, item: T) -> None:
        """Remove an item that waits no longer, if it is still in the queue. Its tenant owes nothing for it."""
        removed = next((entry for entry in self._entries if entry.item is item), None)
        if removed is not None:
            self._end_of[removed.tenant] -= removed.length
            self._entries.remove(removed)
            heapq.heapify(self._entries)
            self._forget_if_empty()

    def take(self, item: T) -> None:
        """Remove an item that is served, perhaps before its turn."""
        place = next(place for place, entry in enumerate(self._entries) if entry.item is item)
        self._now = max(self._now, self._entries[place].begin)
        if place == 0:
            heapq.heappop(self._entries)
        else:
            del self._entries[place]
            heapq.heapify(self._entries)
        self._forget_if_empty()

    def behind_first(self) -> list[T]:
        """Return the first item of every tenant but that of the first item, in order, if it has the same priority."""
        first, others = self._entries[0], dict[str, _Entry[T]]()
        for entry in self._entries:
            if entry.tenant != first.tenant and entry.priority == first.priority:
                others[entry.tenant] = min(entry, others.get(entry.tenant, entry))
        return [entry.item for entry in sorted(others.values())]

    def least_entitled(self) -> T:
        """Return the newest item of the tenant with the most items: the one to drop if there are too many."""
        counts: dict[str, int] = {}
        for entry in self._entries:
            counts[entry.tenant] = counts.get(entry.tenant, 0) + 1
        most = max(counts.values())
        return max(
            (entry for entry in self._entries if counts[entry.tenant] == most), key=lambda entry: entry.number
        ).item

    def _forget_if_empty(self) -> None:
        if not self._entries:  # nobody waits, so nobody is owed anything
            self._end_of.clear()
            self._now = 0.0
