"""Counts what ranks have made of their orders."""

from bisect import bisect_left
from collections import Counter

from cluster.spec.tiers import ORDER_BOUNDS_S, MoveKind, PagesMoved, RankWork, StorageFigures


class Tally:
    """One replica's."""

    def __init__(self) -> None:
        self._work: dict[tuple[MoveKind, int], RankWork] = {}
        self.storage: dict[int, StorageFigures] = {}
        """By global rank: what it last told."""

    def add(self, kind: MoveKind, answer: PagesMoved) -> None:
        """A rank has answered an order."""
        if answer.storage is not None:
            self.storage[answer.global_rank] = answer.storage
        key = kind, answer.global_rank
        before = self._work.get(key, RankWork(kind=kind, global_rank=answer.global_rank))
        within = list(before.num_within)
        within[bisect_left(ORDER_BOUNDS_S, answer.waited_s + answer.busy_s)] += 1
        self._work[key] = RankWork(
            kind=kind,
            global_rank=answer.global_rank,
            num_orders=before.num_orders + 1,
            num_bytes=before.num_bytes + answer.num_bytes,
            busy_s=before.busy_s + answer.busy_s,
            waited_s=before.waited_s + answer.waited_s,
            num_within=tuple(within),
            failures=dict(Counter(before.failures) + Counter(answer.failures)),
        )

    @property
    def work(self) -> tuple[RankWork, ...]:
        """Of all ranks and kinds that there were orders of."""
        return tuple(self._work.values())
