"""Sequences that wait for pages, and the one for which freed pages are kept. No I/O."""

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from heapq import merge
from itertools import islice
from typing import Generic, TypeVar

from cluster.spec.ids import Room
from workers.scheduler.sequence import TokenSequence, urgency
from workers.scheduler.shares import Shares

LOOKAHEAD = 256
"""Maximum number of sequences examined per step."""

W = TypeVar("W", bound=TokenSequence)


@dataclass(slots=True, eq=False)
class _Line(Generic[W]):
    """Waiting sequences of one tenant."""

    by_arrival: list[W] = field(default_factory=list)
    by_priority: list[W] = field(default_factory=list)

    def ranked(self) -> Iterator[tuple[int, int, int, W]]:
        """Yield each sequence after the key that merges it with those of other tenants."""
        for number, sequence in enumerate(self.by_priority):
            yield sequence.priority, number, sequence.arrival_number, sequence


class Waiting(Generic[W]):
    """Waiting sequences by tenant, by arrival and by priority. A preempted sequence returns to its old position.

    Pages are kept for the oldest sequence of the tenant whose turn it is: the one that holds the fewest pages per
    weight when the turn begins. The turn ends when that sequence starts or leaves, so every tenant's turn comes.
    """

    def __init__(self, count_held: Callable[[], Shares]) -> None:
        """Create an empty queue. ``count_held`` returns the pages that each tenant holds."""
        self._count_held = count_held
        self._by_room: dict[Room, W] = {}
        self._lines: dict[str, _Line[W]] = {}
        self._turn: str | None = None
        """Tenant whose turn it is. None until the next turn begins."""
        self._held = Shares()
        """Pages that each tenant held when the turn began. Empty if no other tenant waited."""
        self._overtakers: set[Room] = set()
        """Sequences that started while the oldest one waited."""
        self._num_overtaken_pages = 0
        """Number of pages that others took while the oldest sequence needed them."""
        self._blocked: set[W] = set()
        """Sequences that could not start. They are tried again when ``_num_gains`` or the oldest sequence changes."""
        self._num_gains = 0

    def __len__(self) -> int:
        return len(self._by_room)

    def __contains__(self, room: Room) -> bool:
        return room in self._by_room

    def __iter__(self) -> Iterator[W]:
        return iter(self._by_room.values())

    @property
    def tenants(self) -> Collection[str]:
        return self._lines.keys()

    @property
    def oldest(self) -> W | None:
        """Oldest sequence of the tenant whose turn it is. Pages are kept for it. None if no sequence waits."""
        if self._turn is None and self._lines:
            self._held = self._count_held() if len(self._lines) > 1 else Shares()
            self._turn = min(self._lines, key=self._turn_key)
        return self._lines[self._turn].by_arrival[0] if self._turn is not None else None

    def add(self, sequence: W) -> None:
        self._by_room[sequence.room] = sequence
        line = self._lines.setdefault(sequence.tenant, _Line())
        insort(line.by_arrival, sequence, key=_arrival)
        insort(line.by_priority, sequence, key=urgency)
        if sequence.tenant == self._turn and line.by_arrival[0] is sequence:
            self._reset()

    def remove(self, room: Room) -> None:
        sequence = self._by_room.pop(room, None)
        if sequence is None:
            return
        self._blocked.discard(sequence)
        line = self._lines[sequence.tenant]
        was_oldest = sequence.tenant == self._turn and line.by_arrival[0] is sequence
        del line.by_arrival[bisect_left(line.by_arrival, _arrival(sequence), key=_arrival)]
        del line.by_priority[bisect_left(line.by_priority, urgency(sequence), key=urgency)]
        if not line.by_arrival:
            del self._lines[sequence.tenant]
        if was_oldest:
            self.end_turn()

    def end_turn(self) -> None:
        """Keep no more pages for the oldest sequence until its tenant's turn comes again."""
        self._turn = None
        self._reset()

    def candidates(self) -> list[W]:
        """Return the sequences to examine now: the most urgent ones of all tenants, and each tenant's oldest one."""
        lines = self._lines.values()
        if len(lines) == 1:
            first = next(iter(lines)).by_priority[:LOOKAHEAD]
        else:
            first = [sequence for *_, sequence in islice(merge(*(line.ranked() for line in lines)), LOOKAHEAD)]
        return list(dict.fromkeys([*first, *(line.by_arrival[0] for line in lines)]))

    def untried(self, num_gains: int) -> list[W]:
        """Return the candidates that have not failed to start since ``num_gains`` last changed."""
        blocked = self._still_blocked(num_gains)
        return [sequence for sequence in self.candidates() if sequence not in blocked]

    def is_blocked(self, sequence: W, num_gains: int) -> bool:
        """Return whether a sequence has failed to start and no page has become free since."""
        return sequence in self._still_blocked(num_gains)

    def note_blocked(self, sequence: W) -> None:
        """Skip a sequence until pages become free or the oldest sequence changes."""
        self._blocked.add(sequence)

    def has_overtaken(self, sequence: W) -> bool:
        """Return whether a sequence started while the oldest one waited."""
        return sequence.room in self._overtakers

    def most_overtaking(self, sequence: W, oldest_pages: int) -> int:
        """Return how many of the ``oldest_pages`` pages that the oldest sequence needs may go to this one first. 0 if
        its tenant held more pages when the turn began.
        """
        if self._turn is not None and self._held.used(sequence.tenant) > self._held.used(self._turn):
            return 0
        return max(0, oldest_pages - self._num_overtaken_pages)

    def note_overtaken(self, sequence: W, num_pages: int) -> None:
        """Record that a sequence starts with pages for which the oldest sequence may have to wait."""
        self._overtakers.add(sequence.room)
        self._num_overtaken_pages += num_pages

    def _turn_key(self, tenant: str) -> tuple[float, int]:
        """Return a tenant's sort key. The tenant with the smallest has the next turn."""
        return self._held.used(tenant), _arrival(self._lines[tenant].by_arrival[0])

    def _reset(self) -> None:
        self._num_overtaken_pages = 0
        self._overtakers.clear()
        self._blocked.clear()

    def _still_blocked(self, num_gains: int) -> set[W]:
        if num_gains != self._num_gains:
            self._num_gains = num_gains
            self._blocked.clear()
        return self._blocked


def _arrival(sequence: TokenSequence) -> int:
    return sequence.arrival_number
