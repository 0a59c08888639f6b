"""Copies of a GPU's pages in pinned host memory, in the order of its steps. Who has which slot is known elsewhere."""

import mmap
import time
from collections.abc import Iterable, Sequence

import torch

from cluster.spec.step_messages import HostCopy
from workers.cache.page_copies import PageCopies
from workers.cache.page_pool import PagePool
from workers.device import synchronize

_MOST_SAMPLES = 5


class GpuHostPages:
    """What HostPages is to a CPU: here the stream on which steps compute copies, too, so that no step has to wait.

    All memory is taken at the start, since to pin it takes long.
    """

    def __init__(self, pool: PagePool, num_slots: int) -> None:
        """``memory`` is to be pinned before anything is copied."""
        self._pages = pool.data
        self.num_slots = num_slots
        # Whole pages of the system, which no other pinned memory shares.
        self.memory = memoryview(mmap.mmap(-1, num_slots * self._pages[0].nbytes))
        """All slots."""
        self._slots = torch.frombuffer(self.memory, dtype=self._pages.dtype).view(num_slots, *self._pages.shape[1:])
        self._copied: torch.cuda.Event | None = None
        """After the copies of this step."""

    def measure_page_s(self) -> float:
        """How long it takes to copy a page."""
        num_samples = min(_MOST_SAMPLES, self.num_slots)
        synchronize(self._pages.device)
        start_s = time.perf_counter()
        PageCopies(self._pages, [len(self._pages) - 1] * num_samples, self._slots, range(num_samples)).start()
        synchronize(self._pages.device)
        return (time.perf_counter() - start_s) / num_samples

    def begin(self, saves: Sequence[HostCopy], loads: Sequence[HostCopy]) -> None:
        """Start a step's copies: pages to slots, then slots to pages; behind the step before."""
        PageCopies(
            self._pages, _all(save.pages for save in saves), self._slots, _all(save.slots for save in saves)
        ).start()
        PageCopies(
            self._slots, _all(load.slots for load in loads), self._pages, _all(load.pages for load in loads)
        ).start()
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


def _all(lists: Iterable[list[int]]) -> list[int]:
    return [number for each in lists for number in each]
