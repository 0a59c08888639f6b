"""Copies between one rank's device memory and the host memory of its replica."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from cluster.spec.registry import KvOwnership, RankRecord
from cluster.spec.tiers import TierPage
from transfer.backends.interface import TransferBackend
from transfer.page_assignment import HostShare, copies_of, local_page
from transfer.page_range import PageRange, Span, batches
from workers.memory.layerwise_load import LayerwiseLoad

if TYPE_CHECKING:  # the simulator has no torch
    from workers.device import Event
    from workers.memory.peer_memory import TierMemory

READ_SPANS = 64
"""Maximum number of spans read from a peer in one call."""
MOST_LAYER_GROUPS = 8
"""Maximum number of layer groups in a layerwise load. More groups let a step start sooner but need more copies."""


class Copier:
    """Copier of one rank. Each host page belongs to one rank; others with the same heads and layers read it there."""

    def __init__(
        self, records: Sequence[RankRecord], rank: int, memory: "TierMemory", backend: TransferBackend
    ) -> None:
        """Create a rank's copier. ``records`` describe all ranks of the replica."""
        self._record = records[rank]
        self._backend = backend
        self.memory = memory
        self._share = HostShare.of(self._record)
        self._peers = {HostShare.of(record).owner: record for record in records if _is_peer(record, self._record)}

    def bytes_of(self, page: TierPage) -> int:
        """Return a page's size on this rank. 0 if this rank has none of the layers whose KV is in the page."""
        return self._record.layout.bytes_of(page.lifetime)

    def owns(self, page: TierPage) -> bool:
        """Return whether this rank keeps its part of the page's host copy."""
        return self._share.has(page.index) and self.bytes_of(page) > 0

    def host_page(self, page: TierPage) -> memoryview:
        return self.memory.host_page(self.slot(page))[: self.bytes_of(page)]

    def slot(self, page: TierPage) -> int:
        """Return the index of a page in the host memory of the rank that owns it."""
        assert page.host is not None, "a tier job without host pages"
        return page.host // self._share.num_owners

    def holds(self, page: TierPage) -> bool:
        """Return whether a page belongs on this rank's device."""
        sizes, coords = self._record.sizes, self._record.coords
        is_owned = self._record.ownership is KvOwnership.REPLICATED or page.index % sizes.cp == coords.cp
        return is_owned and self.bytes_of(page) > 0

    def save(self, pages: Sequence[TierPage], after: "Event | None") -> int:
        """Copy the pages that this rank owns to host memory. Return the number of bytes copied."""
        local, slots = self._owned(pages)
        self.memory.save(local, slots, after)
        return len(local) * self._record.layout.page_bytes

    def load(self, pages: Sequence[TierPage], after: "Event | None") -> int:
        """Copy from host memory the pages that belong on this rank's device. Return the number of bytes copied.

        Raises:
            TransferError: a peer's memory cannot be read.
        """
        pages = self._held(pages)
        try:
            self._load(pages, None, after)
        finally:  # after an error, the pages are given back, so no copy may be in progress
            self.memory.wait_loads()
        return len(pages) * self._record.layout.page_bytes

    def load_layerwise(self, pages: Sequence[TierPage], after: "Event | None", load: LayerwiseLoad) -> int:
        """Load pages like ``load``, but report each layer group once it is loaded. Return the number of bytes copied.

        Raises:
            TransferError: a peer's memory cannot be read.
        """
        deque(self.layer_loads(pages, after, load), maxlen=0)
        return len(self._held(pages)) * self._record.layout.page_bytes

    def layer_loads(self, pages: Sequence[TierPage], after: "Event | None", load: LayerwiseLoad) -> Iterator[None]:
        """Load and report one layer group per iteration."""
        pages = self._held(pages)
        if after is not None and not all(map(self.owns, pages)):
            # The region may still hold earlier data for these pages that has not been copied to the GPU.
            after.synchronize()
        for layers in layer_groups(self._record.layout.layers):
            load.add(len(layers), self._load(pages, layers, after))
            yield
        self.memory.wait_loads()

    def _load(self, pages: Sequence[TierPage], layers: range | None, after: "Event | None") -> "Event | None":
        for lifetime in range(self._record.layout.num_lifetimes):
            some = [page for page in pages if page.lifetime == lifetime]
            after = self._load_some(some, lifetime, layers, after) if some else after
        return after

    def _load_some(
        self, pages: Sequence[TierPage], lifetime: int, layers: range | None, after: "Event | None"
    ) -> "Event | None":
        local, slots = self._owned(pages)
        loaded = self.memory.load(local, slots, lifetime, layers, after)
        elsewhere = [page for page in pages if not self.owns(page)]
        if not elsewhere:
            return loaded
        if layers is None and loaded is not None:
            # After this event, the region's earlier data for these pages is on the GPU.
            loaded.synchronize()
        self._read(elsewhere, layers)
        return self.memory.take_in([self._local(page) for page in elsewhere], lifetime, layers, loaded)

    def _held(self, pages: Sequence[TierPage]) -> Sequence[TierPage]:
        return list(filter(self.holds, pages))

    def _owned(self, pages: Sequence[TierPage]) -> tuple[list[int], list[int]]:
        """Return the device pages and host slots of the owned pages."""
        owned = [page for page in pages if self.owns(page)]
        return [self._local(page) for page in owned], [self.slot(page) for page in owned]

    def _local(self, page: TierPage) -> int:
        assert page.device is not None, "a tier job without device pages"
        return local_page(self._record, page.device)

    def _read(self, pages: Sequence[TierPage], layers: range | None) -> None:
        """Read pages from the host memory of the ranks that own them into this rank's region."""
        by_owner: dict[int, list[TierPage]] = {}
        for page in pages:
            by_owner.setdefault(page.index % self._share.num_owners, []).append(page)
        for owner, owned in by_owner.items():
            source = self._peers[owner].host_endpoint
            assert source is not None, f"rank {self._peers[owner].global_rank} has no host memory"
            spans = [span for page in owned for span in self._spans(page, layers)]
            for batch in batches(spans, READ_SPANS):
                self._backend.read(source, self.memory.region, batch)

    def _spans(self, page: TierPage, layers: range | None) -> list[Span]:
        host, device = (
            PageRange(self._record.layout, [number], layers, lifetime=page.lifetime)
            for number in (self.slot(page), self._local(page))
        )
        return host.spans_to(device)


def layer_groups(layers: range) -> Iterator[range]:
    """Divide a stage's layers into groups of equal size for a layerwise load."""
    size = -(-len(layers) // MOST_LAYER_GROUPS)
    return (layers[first : first + size] for first in range(0, len(layers), size))


def _is_peer(record: RankRecord, mine: RankRecord) -> bool:
    """Return whether a rank holds the same heads and layers as this rank, if not necessarily of the same pages."""
    here, there, copies = mine.coords, record.coords, copies_of(mine)
    return (here.dp, here.tp // copies, here.pp) == (there.dp, there.tp // copies, there.pp)
