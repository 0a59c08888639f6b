"""A rank's pages on its device, for copies from and to pages of host memory."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from cluster.spec.kv import PoolLayout
from transfer.backends.interface import Region
from workers.cache.layer_arrivals import LayerArrivals
from workers.cache.page_copies import PageCopies, copy_stream
from workers.cache.page_pool import PagePool
from workers.cache.registered_pages import RegisteredPages
from workers.cache.staging import Staging
from workers.device import Moment

MOST_GROUPS = 8
"""Of layers, one after another. More would begin a step sooner, and end it later: each needs copies of its own."""
Mark = Moment
Pair = tuple[int, int]
"""A page on the device, and one in host memory."""
ReadLayers = Callable[[slice], None]
"""Reads some layers of pages that peers have into the region."""


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

    def fill(
        self, pairs: Sequence[Pair], elsewhere: Sequence[int], read: ReadLayers, after: Mark, arrivals: LayerArrivals
    ) -> None:
        """The same, and the pages that are elsewhere; some layers of all before the next ones, telling of each."""
        ...

    def take_in(self, pages: Sequence[int], after: Mark) -> None:
        """What was read from peers into the region."""
        ...


class RegionPages:
    """Those of a CPU, which are in the region itself."""

    def __init__(self, region: Region, host: Region, layout: PoolLayout) -> None:
        self._pages = _pages(region, layout)
        self._host = _pages(host, layout)

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

    def fill(
        self,
        pairs: Sequence[Pair],
        elsewhere: Sequence[int],  # noqa: ARG002 - they are where they are read to
        read: ReadLayers,
        after: Mark,  # noqa: ARG002 - see ``mark``
        arrivals: LayerArrivals,
    ) -> None:
        """To the region, too."""
        for layers in _groups(self._pages.shape[2]):
            for page, slot in pairs:
                np.copyto(self._pages[page, :, layers], self._host[slot, :, layers])
            read(layers)
            arrivals.note(layers.stop - layers.start, None)

    def take_in(self, pages: Sequence[int], after: Mark) -> None:
        """They are there."""


class StagedPages:
    """Those of a GPU, which copies between them and pinned host memory by itself, on a stream of its own.

    Only what is read from peers passes through the region, where that is apart; a page that is saved does not, since
    others may be writing to its place there.
    """

    def __init__(
        self, pool: PagePool, staging: Staging | RegisteredPages, region: Region, host: Region, layout: PoolLayout
    ) -> None:
        self._staging = staging
        self._pages = pool.data.flatten(3).view(torch.uint8)
        self._region = torch.from_numpy(_pages(region, layout))
        self._host = torch.from_numpy(_pages(host, layout))
        self._inward, self._outward = copy_stream(self._pages.device), copy_stream(self._pages.device)

    def mark(self) -> Mark:
        """What has arrived was taken in by a step before: leaders order no copy in between."""
        return self._staging.mark()

    def save(self, pairs: Sequence[Pair], after: Mark) -> None:
        """From the GPU."""
        pages, slots = _unzipped(pairs)
        self._copy(PageCopies(self._pages, pages, self._host, slots), self._outward, after)

    def load(self, pairs: Sequence[Pair], after: Mark) -> None:
        """To the GPU."""
        self._copy(self._from_host(pairs), self._inward, after)

    def fill(
        self, pairs: Sequence[Pair], elsewhere: Sequence[int], read: ReadLayers, after: Mark, arrivals: LayerArrivals
    ) -> None:
        """To the GPU, too."""
        if elsewhere and after is not None:
            # What arrived in their places before has to be on the GPU.
            after.synchronize()
        own, taken_in = self._from_host(pairs), self._from_region(elsewhere)
        for layers in _groups(self._pages.shape[2]):
            self._start(own.layers(layers), self._inward, after)
            read(layers)
            moment = self._start(taken_in.layers(layers), self._inward, after)
            arrivals.note(layers.stop - layers.start, moment)
        if self._inward is not None:
            self._inward.synchronize()

    def take_in(self, pages: Sequence[int], after: Mark) -> None:
        """To the GPU as well, where it was not read right there; ``load`` has waited for the moment before that."""
        self._copy(self._from_region(pages), self._inward, after)

    def _from_host(self, pairs: Sequence[Pair]) -> PageCopies:
        pages, slots = _unzipped(pairs)
        return PageCopies(self._host, slots, self._pages, pages)

    def _from_region(self, pages: Sequence[int]) -> PageCopies:
        """None where peers' pages are read right into a registered pool."""
        apart = pages if len(self._region) else []
        return PageCopies(self._region, apart, self._pages, apart)

    def _copy(self, copies: PageCopies, stream: torch.cuda.Stream | None, after: Mark) -> None:
        self._start(copies, stream, after)
        if stream is not None:
            stream.synchronize()

    @staticmethod
    def _start(copies: PageCopies, stream: torch.cuda.Stream | None, after: Mark) -> Moment:
        """The moment in which they will be there."""
        if stream is None:
            copies.start()
            return None
        assert after is not None, "a GPU's pages without the moment from which on they may be copied"
        with torch.cuda.stream(stream):
            stream.wait_event(after)
            copies.start()
            moment: Moment = stream.record_event()
        return moment


def _unzipped(pairs: Sequence[Pair]) -> tuple[list[int], list[int]]:
    return [page for page, _ in pairs], [slot for _, slot in pairs]


def _groups(num_layers: int) -> Iterator[slice]:
    """Of like size."""
    size = -(-num_layers // MOST_GROUPS)
    return (slice(first, min(first + size, num_layers)) for first in range(0, num_layers, size))


def _pages(region: Region, layout: PoolLayout) -> npt.NDArray[np.uint8]:
    """``[page, head, layer, byte]``."""
    flat = np.frombuffer(region.buffer, dtype=np.uint8)
    num_pages = len(flat) // layout.page_bytes
    shape = (num_pages, layout.num_heads, layout.num_layers, layout.layer_bytes)
    return flat[: num_pages * layout.page_bytes].reshape(shape)
