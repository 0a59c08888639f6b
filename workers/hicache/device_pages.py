"""A rank's device pages, for copies to and from pages of host memory."""

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
"""Most groups of layers of a layerwise load. More would start a step sooner and end it later: each costs copies."""
Event = Moment
Pair = tuple[int, int]
"""A device page and a host page."""
ReadLayers = Callable[[slice], None]
"""Reads some layers of peers' pages into the region."""


class DevicePages(Protocol):
    """Copies between device and host pages; they are complete on return."""

    def record_event(self) -> Event:
        """Return an event after everything started so far; called on the computing thread."""
        ...

    def save(self, pairs: Sequence[Pair], after: Event) -> None:
        """Copy device pages to the host, after the event."""
        ...

    def load(self, pairs: Sequence[Pair], after: Event) -> None:
        """Copy host pages to the device, after the event."""
        ...

    def load_layerwise(
        self, pairs: Sequence[Pair], elsewhere: Sequence[int], read: ReadLayers, after: Event, arrivals: LayerArrivals
    ) -> None:
        """Load pages, and those that peers have, a group of layers at a time; report each group."""
        ...

    def load_from_region(self, pages: Sequence[int], after: Event) -> None:
        """Copy pages that were read from peers into the region to the device."""
        ...


class RegionPages:
    """Pages of a CPU, which lie in the region itself."""

    def __init__(self, region: Region, host: Region, layout: PoolLayout) -> None:
        self._pages = _pages(region, layout)
        self._host = _pages(host, layout)

    def record_event(self) -> Event:
        """Return nothing: on a CPU everything that was started is done."""

    def save(self, pairs: Sequence[Pair], after: Event) -> None:  # noqa: ARG002 - see ``record_event``
        for page, slot in pairs:
            np.copyto(self._host[slot], self._pages[page])

    def load(self, pairs: Sequence[Pair], after: Event) -> None:  # noqa: ARG002 - see ``record_event``
        for page, slot in pairs:
            np.copyto(self._pages[page], self._host[slot])

    def load_layerwise(
        self,
        pairs: Sequence[Pair],
        elsewhere: Sequence[int],  # noqa: ARG002 - they are read to where they belong
        read: ReadLayers,
        after: Event,  # noqa: ARG002 - see ``record_event``
        arrivals: LayerArrivals,
    ) -> None:
        for layers in _groups(self._pages.shape[2]):
            for page, slot in pairs:
                np.copyto(self._pages[page, :, layers], self._host[slot, :, layers])
            read(layers)
            arrivals.note(layers.stop - layers.start, None)

    def load_from_region(self, pages: Sequence[int], after: Event) -> None:
        """Do nothing: they were read to where they belong."""


class StagedPages:
    """Pages of a GPU, which copies them to and from pinned host memory on streams of its own.

    Only pages read from peers pass through the region, if that is apart. Saved pages do not, since peers may be writing
    to them there.
    """

    def __init__(
        self, pool: PagePool, staging: Staging | RegisteredPages, region: Region, host: Region, layout: PoolLayout
    ) -> None:
        self._staging = staging
        self._pages = pool.data.flatten(3).view(torch.uint8)
        self._region = torch.from_numpy(_pages(region, layout))
        self._host = torch.from_numpy(_pages(host, layout))
        self._inward, self._outward = copy_stream(self._pages.device), copy_stream(self._pages.device)

    def record_event(self) -> Event:
        """Return an event after which all received pages are on the GPU: no job comes between arrival and a step."""
        return self._staging.mark()

    def save(self, pairs: Sequence[Pair], after: Event) -> None:
        pages, slots = _unzipped(pairs)
        self._copy(PageCopies(self._pages, pages, self._host, slots), self._outward, after)

    def load(self, pairs: Sequence[Pair], after: Event) -> None:
        self._copy(self._from_host(pairs), self._inward, after)

    def load_layerwise(
        self, pairs: Sequence[Pair], elsewhere: Sequence[int], read: ReadLayers, after: Event, arrivals: LayerArrivals
    ) -> None:
        if elsewhere and after is not None:
            # Pages that arrived in the same part of the region before must have left it.
            after.synchronize()
        own, taken_in = self._from_host(pairs), self._from_region(elsewhere)
        for layers in _groups(self._pages.shape[2]):
            self._start(own.layers(layers), self._inward, after)
            read(layers)
            event = self._start(taken_in.layers(layers), self._inward, after)
            arrivals.note(layers.stop - layers.start, event)
        if self._inward is not None:
            self._inward.synchronize()

    def load_from_region(self, pages: Sequence[int], after: Event) -> None:
        """Copy pages to the GPU unless they were read right there; ``load`` has waited for the event."""
        self._copy(self._from_region(pages), self._inward, after)

    def _from_host(self, pairs: Sequence[Pair]) -> PageCopies:
        pages, slots = _unzipped(pairs)
        return PageCopies(self._host, slots, self._pages, pages)

    def _from_region(self, pages: Sequence[int]) -> PageCopies:
        """Return the copies from the region, none where peers' pages are read right into a registered pool."""
        apart = pages if len(self._region) else []
        return PageCopies(self._region, apart, self._pages, apart)

    def _copy(self, copies: PageCopies, stream: torch.cuda.Stream | None, after: Event) -> None:
        self._start(copies, stream, after)
        if stream is not None:
            stream.synchronize()

    @staticmethod
    def _start(copies: PageCopies, stream: torch.cuda.Stream | None, after: Event) -> Event:
        """Start copies; return the event of their end."""
        if stream is None:
            copies.start()
            return None
        assert after is not None, "a copy on a GPU without an event to wait for"
        with torch.cuda.stream(stream):
            stream.wait_event(after)
            copies.start()
            event: Event = stream.record_event()
        return event


def _unzipped(pairs: Sequence[Pair]) -> tuple[list[int], list[int]]:
    return [page for page, _ in pairs], [slot for _, slot in pairs]


def _groups(num_layers: int) -> Iterator[slice]:
    """Split layers into groups of equal size."""
    size = -(-num_layers // MOST_GROUPS)
    return (slice(first, min(first + size, num_layers)) for first in range(0, num_layers, size))


def _pages(region: Region, layout: PoolLayout) -> npt.NDArray[np.uint8]:
    """Return a view ``[page, head, layer, byte]``."""
    flat = np.frombuffer(region.buffer, dtype=np.uint8)
    num_pages = len(flat) // layout.page_bytes
    shape = (num_pages, layout.num_heads, layout.num_layers, layout.layer_bytes)
    return flat[: num_pages * layout.page_bytes].reshape(shape)
