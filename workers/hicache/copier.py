"""Copies between the device pool and the host pools of a replica: bytes, no keys."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cluster.spec.registry import KvOwnership, RankRow
from cluster.spec.tiers import TierPage
from transfer.backends.interface import Region, TransferBackend
from transfer.plan import Span, local_page
from workers.cache.layer_arrivals import LayerArrivals

if TYPE_CHECKING:  # torch stays out of the simulator
    from workers.hicache.device_pages import DevicePages, Event, Pair

READ_SPANS = 64
"""Most spans read from a peer in one call."""


class Copier:
    """Copies of one rank. A host page belongs to one CP rank; where KV is replicated, the others read it from there."""

    def __init__(
        self,
        rows: Sequence[RankRow],
        rank: int,
        device: "DevicePages",
        region: Region,
        host: Region,
        backend: TransferBackend,
    ) -> None:
        """``rows`` are all ranks of the replica; ``device``, ``region`` and ``host`` belong to this one.

        Peers' memory is read into the region.
        """
        self._row = rows[rank]
        self._backend = backend
        self._device = device
        self._region = region
        self._host = host.buffer
        self._page_bytes = self._row.layout.page_bytes
        self._peers = {row.coords.cp: row for row in rows if _is_peer(row, self._row)}

    @property
    def page_bytes(self) -> int:
        return self._page_bytes

    def owns(self, page: TierPage) -> bool:
        """Return whether the page's host copy belongs to this rank."""
        return page.index % self._row.sizes.cp == self._row.coords.cp

    def host_page(self, page: TierPage) -> memoryview:
        """Return the bytes of a host page that this rank owns."""
        start = self._slot(page) * self._page_bytes
        return self._host[start : start + self._page_bytes]

    def record_event(self) -> "Event":
        """Return the event after which the copies of a new job begin; called on the computing thread."""
        return self._device.record_event()

    def save(self, pages: Sequence[TierPage], after: "Event") -> int:
        """Copy the pages that this rank owns to host memory; return the bytes copied."""
        pairs = self._owned(pages)
        self._device.save(pairs, after)
        return len(pairs) * self._page_bytes

    def load_layerwise(self, pages: Sequence[TierPage], after: "Event", arrivals: LayerArrivals) -> int:
        """Load pages layer by layer, and report each; return the bytes copied."""
        pages = self._kept(pages)
        elsewhere = [page for page in pages if not self.owns(page)]

        def read(layers: slice) -> None:
            self._read([(page, span) for page in elsewhere for span in self._spans(page, layers)])

        self._device.load_layerwise(
            self._owned(pages), [self._local(page) for page in elsewhere], read, after, arrivals
        )
        return len(pages) * self._page_bytes

    def load(self, pages: Sequence[TierPage], after: "Event") -> int:
        """Fill the device pages that this rank has of these; return the bytes copied.

        Raises:
            TransferError: a peer's memory cannot be read.
        """
        pages = self._kept(pages)
        self._device.load(self._owned(pages), after)
        elsewhere = [page for page in pages if not self.owns(page)]
        self._read([(page, self._span(page)) for page in elsewhere])
        self._device.load_from_region([self._local(page) for page in elsewhere], after)
        return len(pages) * self._page_bytes

    def _kept(self, pages: Sequence[TierPage]) -> Sequence[TierPage]:
        """Return the pages of which this rank has a device page."""
        is_sharded = self._row.ownership is KvOwnership.SHARDED
        return [page for page in pages if self.owns(page)] if is_sharded else pages

    def _owned(self, pages: Sequence[TierPage]) -> "list[Pair]":
        return [(self._local(page), self._slot(page)) for page in pages if self.owns(page)]

    def _local(self, page: TierPage) -> int:
        assert page.device is not None, "a tier job without device pages"
        return local_page(self._row, page.device)

    def _slot(self, page: TierPage) -> int:
        assert page.host is not None, "a tier job without host pages"
        return page.host // self._row.sizes.cp

    def _span(self, page: TierPage) -> Span:
        return Span(self._slot(page) * self._page_bytes, self._local(page) * self._page_bytes, self._page_bytes)

    def _spans(self, page: TierPage, layers: slice) -> list[Span]:
        """Return the spans of some layers, one for each head."""
        layout, whole = self._row.layout, self._span(page)
        num_bytes = (layers.stop - layers.start) * layout.layer_bytes
        firsts = range(layers.start, layout.num_heads * layout.num_layers, layout.num_layers)
        offsets = [first * layout.layer_bytes for first in firsts]
        return [Span(whole.source_offset + at, whole.target_offset + at, num_bytes) for at in offsets]

    def _read(self, wanted: Sequence[tuple[TierPage, Span]]) -> None:
        """Read spans from the host memory of the ranks that own the pages."""
        by_rank: dict[int, list[Span]] = {}
        for page, span in wanted:
            by_rank.setdefault(page.index % self._row.sizes.cp, []).append(span)
        for cp_rank, spans in by_rank.items():
            source = self._peers[cp_rank].host_endpoint
            assert source is not None, f"CP rank {cp_rank} has no host memory"
            for start in range(0, len(spans), READ_SPANS):
                self._backend.read(source, self._region, spans[start : start + READ_SPANS])


def _is_peer(row: RankRow, mine: RankRow) -> bool:
    """Return whether a rank holds the same heads and layers of other pages."""
    here, there = mine.coords, row.coords
    return (here.dp, here.tp, here.pp) == (there.dp, there.tp, there.pp)
