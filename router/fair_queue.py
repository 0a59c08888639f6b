"""Queue that gives every tenant its share. Sans I/O."""

import heapq
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class _Place(NamedTuple):
    """Place in the order; places are ordered like their fields."""

    priority: int
    begin: float
    number: int


class _Entry(NamedTuple, Generic[T]):
    place: _Place
    tenant: str
    length: float
    """Virtual time that the item takes."""
    item: T


class FairQueue(Generic[T]):
    """Queue ordered by priority, then fairly among tenants, then by arrival.

    Start-time fair queueing (Goyal, Vin and Cheng, 1996): tenants are served in proportion to their weights, however
    many items each of them adds. A tenant that was idle is served at once, but has saved nothing up. Any item can leave
    in logarithmic time.
    """

    def __init__(self) -> None:
        self._entries: dict[int, _Entry[T]] = {}
        """Entries by the identities of their items, in order of arrival."""
        self._lines: dict[str, list[_Place]] = {}
        """Heap of each tenant's places. The first has an item; the items of others may have left."""
        self._by_place: dict[_Place, _Entry[T]] = {}
        """Entries by their places."""
        self._num_of = Counter[str]()
        """Number of each tenant's items."""
        self._numbers = itertools.count()
        self._now = 0.0
        """Virtual time: the latest begin of an item taken."""
        self._end_of: dict[str, float] = {}
        """Virtual time at which each tenant's newest item ends, without debts."""
        self._debts: dict[str, float] = {}
        """Virtual time by which each tenant's items begin later than their places say."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[T]:
        return (entry.item for entry in self._entries.values())

    @property
    def first(self) -> T:
        return min(self._heads())[1].item

    def push(self, item: T, tenant: str, cost: float, weight: float = 1.0, priority: int = 0) -> None:
        """Add an item. ``cost`` is the work that it takes, in any unit that all items of the queue share."""
        begin, length = max(self._now - self._debts.get(tenant, 0.0), self._end_of.get(tenant, 0.0)), cost / weight
        self._end_of[tenant] = begin + length
        place = _Place(priority, begin, next(self._numbers))
        self._entries[id(item)] = self._by_place[place] = _Entry(place, tenant, length, item)
        heapq.heappush(self._lines.setdefault(tenant, []), place)
        self._num_of[tenant] += 1

    def pop(self) -> T:
        first = self.first
        self.take(first)
        return first

    def remove(self, item: T) -> None:
        """Remove an item that is no longer wanted, if it is still in the queue. Its tenant is not charged for it."""
        removed = self._entries.get(id(item))
        if removed is not None:
            self._end_of[removed.tenant] -= removed.length
            self._forget(removed)

    def take(self, item: T) -> None:
        """Remove an item that is served, perhaps before its turn."""
        taken = self._entries[id(item)]
        self._now = max(self._now, taken.place.begin + self._debts.get(taken.tenant, 0.0))
        self._forget(taken)

    def charge(self, tenant: str, cost: float, weight: float = 1.0) -> None:
        """Charge a tenant for work beyond an item's estimated cost."""
        if self._entries:
            self._debts[tenant] = self._debts.get(tenant, 0.0) + cost / weight

    def behind_first(self) -> list[T]:
        """Return the first item of every tenant but that of the first item, in order, if it has the same priority."""
        (first, _), *others = sorted(self._heads())
        return [entry.item for place, entry in others if place.priority == first.priority]

    def least_entitled(self) -> T:
        """Return the newest item of the tenant with the most items: the one to drop if there are too many."""
        most = max(self._num_of.values())
        return next(entry.item for entry in reversed(self._entries.values()) if self._num_of[entry.tenant] == most)

    def _heads(self) -> Iterator[tuple[_Place, _Entry[T]]]:
        """Yield the first entry of each tenant, after its place with the tenant's debt."""
        for tenant, line in self._lines.items():
            entry, debt = self._by_place[line[0]], self._debts.get(tenant, 0.0)
            yield (entry.place._replace(begin=entry.place.begin + debt) if debt else entry.place), entry

    def _forget(self, entry: _Entry[T]) -> None:
        del self._entries[id(entry.item)], self._by_place[entry.place]
        self._num_of[entry.tenant] -= 1
        line = self._lines[entry.tenant]
        while line and line[0] not in self._by_place:
            heapq.heappop(line)
        if not line:
            del self._lines[entry.tenant], self._num_of[entry.tenant]
        if not self._entries:  # nobody waits, so nobody is owed anything
            self._end_of.clear()
            self._debts.clear()
            self._now = 0.0
