"""Shares of tenants: how much each has used, and whose turn is next. No I/O.

Use is divided by the tenant's weight and counts tokens in steps and pages in queues. Counters of tokens are virtual
token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024), but only of tenants that compete:
a tenant that got all it wanted in a step starts again with the least counter.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heapreplace
from typing import Generic, TypeVar

from workers.scheduler.sequence import TokenSequence

S = TypeVar("S", bound=TokenSequence)


class Shares:
    """Use by tenant, divided by the tenant's weight."""

    def __init__(self) -> None:
        self._used: dict[str, float] = {}
        self._unserved: set[str] = set()

    @classmethod
    def of_pages(cls, sequences: Iterable[TokenSequence]) -> "Shares":
        """Return how many pages each tenant's sequences hold. A page that several sequences share counts for each."""
        shares = cls()
        for sequence in sequences:
            shares.charge(sequence, sequence.kv.num_pages)
        return shares

    def used(self, tenant: str) -> float:
        return self._used.get(tenant, 0.0)

    def charge(self, sequence: TokenSequence, amount: int) -> None:
        """Count tokens or pages of a sequence as used by its tenant."""
        self._used[sequence.tenant] = self.used(sequence.tenant) + amount / sequence.submit.weight

    def note_unserved(self, sequence: TokenSequence) -> None:
        """Record that a sequence would have used more in this step."""
        self._unserved.add(sequence.tenant)

    def settle(self) -> None:
        """End a step. Forget tenants that got all they wanted, since they have saved nothing and owe nothing. The least
        counter of the others becomes 0, which is also where a new tenant starts.
        """
        least = min(map(self.used, self._unserved), default=0.0)
        self._used = {tenant: self.used(tenant) - least for tenant in self._unserved}
        self._unserved = set()


class Turns(Generic[S]):
    """Iterator over sequences by priority, and among equals by tenant: the one that has used least has the next turn.

    A tenant's sequences of one priority keep their order. What a tenant uses during the iteration counts at once.
    """

    def __init__(self, sequences: Iterable[S], shares: Shares) -> None:
        self._shares = shares
        self._lines: dict[tuple[int, str], deque[S]] = defaultdict(deque)
        for sequence in sequences:
            self._lines[sequence.priority, sequence.tenant].append(sequence)

    def repeat(self, sequence: S) -> None:
        """Return to the newest sequence at its tenant's next turn."""
        self._lines[sequence.priority, sequence.tenant].appendleft(sequence)

    def __iter__(self) -> Iterator[S]:
        if len(self._lines) == 1:
            (line,) = self._lines.values()
            while line:
                yield line.popleft()
            return
        # Ties go to the tenant whose first sequence was given first.
        heap = [
            (priority, self._shares.used(tenant), number, tenant)
            for number, (priority, tenant) in enumerate(self._lines)
        ]
        heapify(heap)
        while heap:
            priority, used, number, tenant = heap[0]
            line = self._lines[priority, tenant]
            if used == self._shares.used(tenant):
                yield line.popleft()
            if line:
                heapreplace(heap, (priority, self._shares.used(tenant), number, tenant))
            else:
                heappop(heap)
