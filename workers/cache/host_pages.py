"""Copies of pages in host memory, made by a thread while a step computes. Who has which slot is known elsewhere."""

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from queue import SimpleQueue

import torch
from torch import Tensor

from cluster.spec.step_messages import HostCopy
from workers.cache.page_pool import PagePool

_SAMPLES = 5
_Copy = tuple[Tensor, Tensor]
"""From and to."""


def pairs_of(copies: Sequence[HostCopy]) -> Iterator[tuple[int, int]]:
    """Every page, and its slot."""
    for copy in copies:
        yield from zip(copy.pages, copy.slots, strict=True)


class HostPages:
    """One rank's. All copies of a step end with it, so that nothing is on its way when pages change hands.

    Memory is reserved with the first copy, and taken as slots are used.
    """

    def __init__(self, pool: PagePool, num_slots: int) -> None:
        self._pages = pool.data.view(pool.num_pages + 1, -1)
        self._page_size = pool.page_size
        self.num_slots = num_slots
        self._slots: Tensor | None = None
        self._queue = SimpleQueue[_Copy | None]()
        self._thread: threading.Thread | None = None
        self._progress = threading.Condition()
        self._num_begun = self._num_done = 0
        self._last_of_page: dict[int, int] = {}
        """Number of the last copy of this step from or to a page."""

    def measure_page_s(self) -> float:
        """How long it takes to copy a page."""
        page, scratch = self._pages[-1], torch.empty_like(self._pages[-1], device="cpu")
        scratch.copy_(page)
        start_s = time.perf_counter()
        for _ in range(_SAMPLES):
            scratch.copy_(page)
        return (time.perf_counter() - start_s) / _SAMPLES

    def begin(self, saves: Sequence[HostCopy], loads: Sequence[HostCopy]) -> None:
        """Start a step's copies: pages to slots, then slots to pages."""
        if not saves and not loads:
            return
        if self._slots is None:
            self._slots = self._pages.new_empty(self.num_slots, self._pages.shape[1], device="cpu")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="host pages", daemon=True)
            self._thread.start()
        for page, slot in pairs_of(saves):
            self._put(page, (self._pages[page], self._slots[slot]))
        for page, slot in pairs_of(loads):
            self._put(page, (self._slots[slot], self._pages[page]))

    def wait_for(self, tables: Iterable[Sequence[int]]) -> None:
        """Wait for the copies from and to these pages, which the step reads or writes."""
        if self._last_of_page:
            self._wait(max((self._last_of_page.get(page, 0) for table in tables for page in table), default=0))

    def finish(self) -> None:
        """Wait for the rest of the step's copies."""
        if self._last_of_page:
            self._wait(self._num_begun)
            self._last_of_page.clear()

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()

    def _put(self, page: int, copy: _Copy) -> None:
        self._num_begun += 1
        self._last_of_page[page] = self._num_begun
        self._queue.put(copy)

    def _run(self) -> None:
        while (copy := self._queue.get()) is not None:
            source, target = copy
            target.copy_(source)
            with self._progress:
                self._num_done += 1
                self._progress.notify_all()

    def _wait(self, number: int) -> None:
        with self._progress:
            self._progress.wait_for(lambda: self._num_done >= number)
