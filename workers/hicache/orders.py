"""Orders to the ranks, and what they have come to when every rank has answered. Sans I/O."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cluster.spec.tiers import MoveKind, MovePages, PagesMoved, TierPage
from workers.hicache.tally import Tally


@dataclass(frozen=True, slots=True)
class Outcome:
    """An order is over: no rank touches its pages any more."""

    done: list[bool]
    """For each page, whether every rank has done its part."""
    failures: Counter[str]
    """What went wrong, over all ranks."""
    now_s: float
    """When the last rank answered."""

    @property
    def num_leading(self) -> int:
        """Pages before the first one that is not done."""
        return next((number for number, is_done in enumerate(self.done) if not is_done), len(self.done))


LATE_S = 5.0
"""What an order about storage may take beyond its patience; after it a call is taken for one that hangs."""


@dataclass(slots=True)
class _Open:
    kind: MoveKind
    done: list[bool]
    on_end: Callable[[Outcome], None]
    failures: Counter[str] = field(default_factory=Counter)
    answered: set[int] = field(default_factory=set)
    due_s: float | None = None
    """From when on it is stuck."""


class Orders:
    """Every rank answers every order once, so that nothing waits for what only one rank knows."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._number = 0
        self._open: dict[int, _Open] = {}
        self.tally = Tally()
        self.outgoing: list[MovePages] = []
        """For all ranks."""
        self._joining: MovePages | None = None

    def give(
        self,
        kind: MoveKind,
        pages: Sequence[TierPage],
        on_end: Callable[[Outcome], None],
        patience_s: float | None = None,
    ) -> None:
        """Order something; ``on_end`` is called with what all ranks made of it."""
        self.outgoing.append(self._open_order(kind, pages, on_end, patience_s))

    def join(self, kind: MoveKind, pages: Sequence[TierPage], on_end: Callable[[Outcome], None]) -> None:
        """The same for an order that goes out with the next step."""
        assert self._joining is None, "two orders for one step"
        self._joining = self._open_order(kind, pages, on_end, None)

    def take_joining(self) -> MovePages | None:
        """The order that goes out with this step, if there is one."""
        order, self._joining = self._joining, None
        return order

    def take_outgoing(self, now_s: float) -> list[MovePages]:
        """The orders since the last call, which begin now."""
        orders, self.outgoing = self.outgoing, []
        for order in orders:
            if order.patience_s is not None:
                self._open[order.number].due_s = now_s + order.patience_s + LATE_S
        return orders

    def stuck(self, now_s: float) -> Counter[MoveKind]:
        """Pages of orders that storage does not come back from, by kind; nobody else gets them before it has."""
        pages = Counter[MoveKind]()
        for order in self._open.values():
            if order.due_s is not None and now_s >= order.due_s:
                pages[order.kind] += len(order.done)
        return pages

    def num_open(self, kind: MoveKind) -> int:
        """Orders of a kind that are not over."""
        return sum(order.kind is kind for order in self._open.values())

    def num_unanswered(self, global_rank: int) -> dict[MoveKind, int]:
        """Orders of every kind that a rank has yet to answer."""
        counts = dict.fromkeys(MoveKind, 0)
        for order in self._open.values():
            counts[order.kind] += global_rank not in order.answered
        return counts

    def on_answer(self, answer: PagesMoved, now_s: float) -> bool:
        """Take in one rank's answer; False for one that belongs to nothing."""
        order = self._open.get(answer.number)
        if order is None or answer.global_rank in order.answered:
            return False
        self.tally.add(order.kind, answer)
        order.answered.add(answer.global_rank)
        order.done = [ours and theirs for ours, theirs in zip(order.done, answer.done, strict=True)]
        order.failures.update(answer.failures)
        if len(order.answered) == self._num_ranks:
            del self._open[answer.number]
            order.on_end(Outcome(order.done, order.failures, now_s))
        return True

    def _open_order(
        self,
        kind: MoveKind,
        pages: Sequence[TierPage],
        on_end: Callable[[Outcome], None],
        patience_s: float | None,
    ) -> MovePages:
        self._number += 1
        self._open[self._number] = _Open(kind, [True] * len(pages), on_end)
        return MovePages(number=self._number, kind=kind, pages=list(pages), patience_s=patience_s)
