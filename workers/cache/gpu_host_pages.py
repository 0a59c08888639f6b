"""Copies of a GPU's pages in pinned host memory, in the order of its steps. Who has which slot is known elsewhere."""

import mmap
import time
from collections.abc import Iterable, Sequence

import torch

from cluster.spec.step_messages import HostCopy
from workers.cache.host_pages import pairs_of
from workers.cache.page_pool import PagePool
from workers.device import synchronize

_SAMPLES = 5


class GpuHostPages:
    """What HostPages is to a CPU: here the stream on which steps compute copies, too, so that no step has to wait.

    All memory is taken at the start, since to pin it takes long.
    """

    def __init__(self, pool: PagePool, num_slots: int) -> None:
        """``memory`` is to be pinned before anything is copied."""
        self._pages = pool.data.view(pool.num_pages + 1, -1)
        self.num_slots = num_slots
        # Whole pages of the system, which no other pinned memory shares.
        self.memory = memoryview(mmap.mmap(-1, num_slots * self._pages[0].nbytes))
        """All slots."""
        self._slots = torch.frombuffer(self.memory, dtype=self._pages.dtype).view(num_slots, -1)
        self._copied: torch.cuda.Event | None = None
        """After the copies of this step."""

    def measure_page_s(self) -> float:
        """How long it takes to copy a page."""
        synchronize(self._pages.device)
        start_s = time.perf_counter()
        for _ in range(_SAMPLES):
            self._slots[0].copy_(self._pages[-1], non_blocking=True)
        synchronize(self._pages.device)
        return (time.perf_counter() - start_s) / _SAMPLES

    def begin(self, saves: Sequence[HostCopy], loads: Sequence[HostCopy]) -> None:
        """Start a step's copies: pages to slots, then slots to pages; behind the step before."""
        for page, slot in pairs_of(saves):
            self._slots[slot].copy_(self._pages[page], non_blocking=True)
        for page, slot in pairs_of(loads):
            self._pages[page].copy_(self._slots[slot], non_blocking=True)
        if (saves or loads) and self._pages.is_cuda:
            self._copied = torch.cuda.current_stream(self._pages.device).record_event()

    def wait_for(self, tables: Iterable[Sequence[int]]) -> None:
        """The step that reads or writes these pages comes behind the copies by itself."""

    def finish(self) -> None:
        """Wait for the step's copies: pages that change hands may be written to by peers, in no stream's order."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None

    def close(self) -> None:
        """Wait, before the memory goes."""
        self.finish()
