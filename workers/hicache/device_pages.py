"""A rank's pages on its device, for copies from and to pages of host memory."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from transfer.backends.interface import Region
from workers.cache.page_pool import PagePool
from workers.cache.staging import Staging, pin

Mark = torch.cuda.Event | None
Pair = tuple[int, int]
"""A page on the device, and one in host memory."""


class DevicePages(Protocol):
    """Copies are there on return."""

    def mark(self) -> Mark:
        """On the computing thread: a moment after everything that was started so far."""
        ...

    def save(self, pairs: Sequence[Pair], after: Mark) -> None:
        """From the device, once the moment has come."""
        ...

    def load(self, pairs: Sequence[Pair], after: Mark) -> None:
        """To the device."""
        ...

    def take_in(self, pages: Sequence[int], after: Mark) -> None:
        """What was read from peers into the region."""
        ...


class RegionPages:
    """Those of a CPU, which are in the region itself."""

    def __init__(self, region: Region, host: Region, page_bytes: int) -> None:
        self._pages = _rows(region, page_bytes)
        self._host = _rows(host, page_bytes)

    def mark(self) -> Mark:
        """Whatever was started is done."""

    def save(self, pairs: Sequence[Pair], after: Mark) -> None:  # noqa: ARG002 - see ``mark``
        """From the region."""
        for page, slot in pairs:
            np.copyto(self._host[slot], self._pages[page])

    def load(self, pairs: Sequence[Pair], after: Mark) -> None:  # noqa: ARG002 - see ``mark``
        """To the region."""
        for page, slot in pairs:
            np.copyto(self._pages[page], self._host[slot])

    def take_in(self, pages: Sequence[int], after: Mark) -> None:
        """They are there."""


class StagedPages:
    """Those of a GPU, which copies between them and pinned host memory by itself, on a stream of its own.

    Only what is read from peers passes through the region; a page that is saved does not, since others may be writing
    to its place there.
    """

    def __init__(self, pool: PagePool, staging: Staging, region: Region, host: Region) -> None:
        self._staging = staging
        self._pages = pool.data.view(len(pool.data), -1).view(torch.uint8)
        page_bytes = self._pages.shape[1]
        self._region = torch.from_numpy(_rows(region, page_bytes))
        self._host = torch.from_numpy(_rows(host, page_bytes))
        self._stream: torch.cuda.Stream | None = None
        if self._pages.is_cuda:
            pin(self._host)
            self._stream = torch.cuda.Stream(self._pages.device)  # type: ignore[no-untyped-call]

    def mark(self) -> Mark:
        """What has arrived was taken in by a step before: leaders order no copy in between."""
        return self._staging.mark()

    def save(self, pairs: Sequence[Pair], after: Mark) -> None:
        """From the GPU."""
        self._copy([(self._host[slot], self._pages[page]) for page, slot in pairs], after)

    def load(self, pairs: Sequence[Pair], after: Mark) -> None:
        """To the GPU."""
        self._copy([(self._pages[page], self._host[slot]) for page, slot in pairs], after)

    def take_in(self, pages: Sequence[int], after: Mark) -> None:
        """To the GPU as well."""
        self._copy([(self._pages[page], self._region[page]) for page in pages], after)

    def _copy(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]], after: Mark) -> None:
        if self._stream is None:
            for target, source in copies:
                target.copy_(source)
            return
        assert after is not None, "a GPU's pages without the moment from which on they may be copied"
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            for target, source in copies:
                target.copy_(source, non_blocking=True)
        self._stream.synchronize()


def _rows(region: Region, page_bytes: int) -> npt.NDArray[np.uint8]:
    flat = np.frombuffer(region.buffer, dtype=np.uint8)
    num_pages = len(flat) // page_bytes
    return flat[: num_pages * page_bytes].reshape(num_pages, page_bytes)
