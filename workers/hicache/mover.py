"""One rank's half of the tiers: carries out the leader's orders beside the forward pass."""

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from cluster.channel import Outbox
from cluster.spec.errors import TransferError
from cluster.spec.tiers import MoveKind, MovePages, PagesMoved
from workers.device import Event
from workers.hicache.copier import Copier
from workers.hicache.lane import Lane
from workers.hicache.storage.page_store import PageStore
from workers.memory.layerwise_load import LayerwiseLoad

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

    def fill(self, order: MovePages) -> LayerwiseLoad:
        """The same for one to load pages that the next step reads, layer after layer as it tells."""
        ...

    def close(self) -> None:
        """Stop; orders that wait are left out."""
        ...


class NoMover:
    """Of a worker without host memory, which never gets an order."""

    def take(self, order: MovePages) -> None:
        raise AssertionError(f"order {order.number} for a worker without host memory")

    def fill(self, order: MovePages) -> LayerwiseLoad:
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
        self._events: dict[int, Event | None] = {}
        """By number of order, when it came."""
        self._arrivals: dict[int, LayerwiseLoad] = {}
        """By number of order, where a step waits for its pages."""
        names = ("saves", "loads", "reads", "writes") if store else ("saves", "loads")
        self._lanes = {
            name: Lane(f"hicache-{name}", leader_address, open_outbox(), self._answer, self._refuse) for name in names
        }

    def take(self, order: MovePages) -> None:
        """The worker calls this between steps, so that every page which is to be saved has its KV."""
        if order.kind in _COPIES:
            self._events[order.number] = self._copier.event()
        self._lanes[_LANES[order.kind]].put(order)

    def fill(self, order: MovePages) -> LayerwiseLoad:
        """On the computing thread, just before the step."""
        arrivals = self._arrivals[order.number] = LayerwiseLoad()
        self.take(order)
        return arrivals

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
        part = self._copy if order.kind in _COPIES else self._use_storage
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
            waited_s=waited_s,
            storage=self._store.figures() if self._store is not None else None,
            failures=failures,
        )

    def _refuse(self, order: MovePages) -> PagesMoved:
        """Storage has not come back from an order before this one."""
        done = [not self._copier.owns(page) for page in order.pages]
        assert order.patience_s is not None, "an order is refused that has no end"
        return PagesMoved(
            number=order.number,
            global_rank=self._global_rank,
            done=done,
            waited_s=order.patience_s,
            failures={"late": done.count(False)},
        )

    def _copy(self, order: MovePages, _waited_s: float, _failures: Counter[str]) -> tuple[list[bool], int]:
        after, arrivals = self._events.pop(order.number), self._arrivals.pop(order.number, None)
        if order.kind is MoveKind.SAVE:
            num_bytes = self._copier.save(order.pages, after)
        elif arrivals is None:
            num_bytes = self._copier.load(order.pages, after)
        else:
            num_bytes = self._fill(order, after, arrivals)
        return [True] * len(order.pages), num_bytes

    def _fill(self, order: MovePages, after: Event | None, arrivals: LayerwiseLoad) -> int:
        """The step that waits for these pages cannot go on without them, nor can the rank."""
        try:
            return self._copier.load_layerwise(order.pages, after, arrivals)
        except Exception as error:
            arrivals.fail(error)
            raise

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


_COPIES = (MoveKind.SAVE, MoveKind.LOAD)
_LANES = {
    MoveKind.SAVE: "saves",
    MoveKind.LOAD: "loads",
    MoveKind.LOOK_UP: "reads",
    MoveKind.FETCH: "reads",
    MoveKind.STORE: "writes",
}
