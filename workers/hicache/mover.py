"""One rank's half of the tiers: carries out the leader's orders beside the forward pass."""

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from cluster.channel import Outbox
from cluster.spec.errors import TransferError
from cluster.spec.tiers import MoveKind, MovePages, PagesMoved
from workers.hicache.copier import Copier
from workers.hicache.device_pages import Mark
from workers.hicache.lane import Lane
from workers.hicache.storage.page_store import PageStore

_log = logging.getLogger(__name__)

CLOSE_S = 5.0
"""Longest wait for orders at hand when a worker ends: storage may hang."""

Part = Callable[[MovePages, float, Counter[str]], tuple[list[bool], int]]
"""Does this rank's part of an order that has waited so many seconds: which pages are done, and the bytes moved."""


class Mover(Protocol):
    """What the worker loop hands orders to."""

    def take(self, order: MovePages) -> None:
        """Carry out an order, after the steps that came before it."""
        ...

    def close(self) -> None:
        """Stop; orders that wait are left out."""
        ...


class NoMover:
    """Of a worker without host memory, which never gets an order."""

    def take(self, order: MovePages) -> None:
        raise AssertionError(f"order {order.number} for a worker without host memory")

    def close(self) -> None:
        """Nothing runs."""


class PageMover:
    """Moves pages between device and host memory, and between host memory and storage, each in a lane of its own."""

    def __init__(
        self,
        copier: Copier,
        store: PageStore | None,
        global_rank: int,
        leader_address: str,
        open_outbox: Callable[[], Outbox],
    ) -> None:
        """Without a store no order is about storage; each lane has an outbox of its own."""
        self._copier = copier
        self._store = store
        self._global_rank = global_rank
        self._marks: dict[int, Mark] = {}
        """By number of order, when it came."""
        names = ("copies", "reads", "writes") if store else ("copies",)
        self._lanes = {
            name: Lane(f"hicache-{name}", leader_address, open_outbox(), self._answer, self._refuse) for name in names
        }

    def take(self, order: MovePages) -> None:
        """The worker calls this between steps, so that every page which is to be saved has its KV."""
        mark = self._copier.mark()
        if _LANES[order.kind] == "copies":
            self._marks[order.number] = mark
        self._lanes[_LANES[order.kind]].put(order)

    def close(self) -> None:
        """Stop; orders that wait are left out."""
        if self._store is not None:
            self._store.stop()
        for lane in self._lanes.values():
            lane.stop()
        until_s = time.monotonic() + CLOSE_S
        busy = [name for name, lane in self._lanes.items() if not lane.wait_ended(until_s - time.monotonic())]
        if busy:
            _log.warning("orders did not end in %g s and are left behind: %s", CLOSE_S, ", ".join(busy))
        elif self._store is not None:
            self._store.close()

    def _answer(self, order: MovePages, waited_s: float) -> PagesMoved:
        start_s = time.monotonic()
        failures = Counter[str]()
        part = self._copy if _LANES[order.kind] == "copies" else self._use_storage
        try:
            done, num_bytes = part(order, waited_s, failures)
        except Exception as error:  # whatever it is, the leader must know that these pages did not come
            _log.warning("order %s %d: %r", order.kind, order.number, error)
            failures["transfer" if isinstance(error, TransferError) else "error"] += 1
            done, num_bytes = [False] * len(order.pages), 0
        return PagesMoved(
            number=order.number,
            global_rank=self._global_rank,
            done=done,
            num_bytes=num_bytes,
            busy_s=time.monotonic() - start_s,
            storage=self._store.figures() if self._store is not None else None,
            failures=failures,
        )

    def _refuse(self, order: MovePages) -> PagesMoved:
        """Storage has not come back from an order before this one."""
        done = [not self._copier.owns(page) for page in order.pages]
        return PagesMoved(
            number=order.number, global_rank=self._global_rank, done=done, failures={"late": done.count(False)}
        )

    def _copy(self, order: MovePages, _waited_s: float, _failures: Counter[str]) -> tuple[list[bool], int]:
        copy = self._copier.save if order.kind is MoveKind.SAVE else self._copier.load
        num_bytes = copy(order.pages, self._marks.pop(order.number))
        return [True] * len(order.pages), num_bytes

    def _use_storage(self, order: MovePages, waited_s: float, failures: Counter[str]) -> tuple[list[bool], int]:
        """Of the pages that this rank owns; the others are done as far as it is concerned."""
        assert self._store is not None, f"{order.kind} without storage"
        assert order.patience_s is not None, f"{order.kind} without an end"
        until_s = time.monotonic() + order.patience_s - waited_s
        owned = [page for page in order.pages if self._copier.owns(page)]
        if order.kind is MoveKind.LOOK_UP:
            found = self._store.look_up(owned, until_s, failures)
        else:
            use = self._store.fetch if order.kind is MoveKind.FETCH else self._store.store
            found = use(owned, self._copier.host_page, until_s, failures)
        outcomes = iter(found)
        done = [next(outcomes) if self._copier.owns(page) else True for page in order.pages]
        return done, 0 if order.kind is MoveKind.LOOK_UP else sum(found) * self._copier.page_bytes


_LANES = {
    MoveKind.SAVE: "copies",
    MoveKind.LOAD: "copies",
    MoveKind.LOOK_UP: "reads",
    MoveKind.FETCH: "reads",
    MoveKind.STORE: "writes",
}
