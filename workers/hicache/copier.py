"""Copies between the device pool and the host pools of a replica. Moves bytes, knows no keys."""

from collections.abc import Iterator, Sequence

import torch

from cluster.spec.registry import KvOwnership, RankRow
from cluster.spec.tiers import TierPage
from transfer.backends.interface import Region, TransferBackend
from transfer.page_range import PageRange, Span
from transfer.plan import local_page
from workers.device import Event
from workers.memory.copy import PageMemory, copy, copy_stream
from workers.memory.layerwise_load import LayerwiseLoad
from workers.memory.peer_memory import PeerMemory

READ_SPANS = 64
"""Most spans read from a peer in one call."""
MOST_LAYER_GROUPS = 8
"""Layer groups of a layerwise load. More would begin a step sooner and end it later: each needs copies of its own."""


class Copier:
    """Copies of one rank. A host page belongs to one CP rank; where KV is replicated, the others read it from there.

    On a GPU, copies run on streams of their own, between the pool and pinned host memory. Only what is read from peers
    passes through the region where that is apart; a saved page does not, since peers may be writing to it there.
    """

    def __init__(
        self, rows: Sequence[RankRow], rank: int, memory: PeerMemory, host: Region, backend: TransferBackend
    ) -> None:
        """Args:
        rows: all ranks of the replica.
        memory: this rank's pool and region; peers' memory is read into the region.
        host: this rank's part of the host tier.
        """
        self._row = rows[rank]
        self._backend = backend
        self._memory = memory
        self._host = PageMemory(torch.frombuffer(host.buffer, dtype=torch.uint8), self._row.layout)
        self._host_bytes = host.buffer
        self._page_bytes = self._row.layout.page_bytes
        self._peers = {row.coords.cp: row for row in rows if _is_peer(row, self._row)}
        device = memory.pool.bytes.device
        self._inward, self._outward = copy_stream(device), copy_stream(device)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page on this rank."""
        return self._page_bytes

    def owns(self, page: TierPage) -> bool:
        """Return whether the page's copy in host memory is this rank's."""
        return page.index % self._row.sizes.cp == self._row.coords.cp

    def host_page(self, page: TierPage) -> memoryview:
        """Return the bytes of a host page that this rank owns."""
        start = self._slot(page) * self._page_bytes
        return self._host_bytes[start : start + self._page_bytes]

    def record_event(self) -> Event | None:
        """Record the event behind which the copies of a new job begin; on the computing thread."""
        return self._memory.event()

    def save(self, pages: Sequence[TierPage], after: Event | None) -> int:
        """Copy the owned ones of these pages to host memory; return the bytes copied."""
        local, slots = self._owned(pages)
        _wait(copy(self._memory.pool.at(local), self._host.at(slots), after, self._outward))
        return len(local) * self._page_bytes

    def load(self, pages: Sequence[TierPage], after: Event | None) -> int:
        """Copy those of these pages that this rank has to the device; return the bytes copied.

        Raises:
            TransferError: a peer's memory cannot be read.
        """
        pages = self._held(pages)
        self._load(pages, None, after)
        return len(pages) * self._page_bytes

    def load_layerwise(self, pages: Sequence[TierPage], after: Event | None, load: LayerwiseLoad) -> int:
        """Load pages as ``load`` does, one layer group after the other; report each.

        Raises:
            TransferError: a peer's memory cannot be read.
        """
        pages = self._held(pages)
        if after is not None and not all(map(self.owns, pages)):
            # What arrived in the region at the same pages before must be on the GPU.
            after.synchronize()
        for layers in layer_groups(self._row.layout.layers):
            load.add(len(layers), self._load(pages, layers, after, wait=False))
        if self._inward is not None:
            self._inward.synchronize()
        return len(pages) * self._page_bytes

    def _load(
        self, pages: Sequence[TierPage], layers: range | None, after: Event | None, *, wait: bool = True
    ) -> Event | None:
        local, slots = self._owned(pages)
        loaded = copy(self._host.at(slots, layers), self._memory.pool.at(local, layers), after, self._inward)
        if wait:
            _wait(loaded)
        elsewhere = [page for page in pages if not self.owns(page)]
        self._read(elsewhere, layers)
        if self._memory.host is not None and elsewhere:
            read = [self._local(page) for page in elsewhere]
            source, target = self._memory.host.at(read, layers), self._memory.pool.at(read, layers)
            loaded = copy(source, target, after, self._inward)
            if wait:
                _wait(loaded)
        return loaded

    def _held(self, pages: Sequence[TierPage]) -> Sequence[TierPage]:
        """Return the pages that this rank has on its device."""
        is_sharded = self._row.ownership is KvOwnership.SHARDED
        return [page for page in pages if self.owns(page)] if is_sharded else pages

    def _owned(self, pages: Sequence[TierPage]) -> tuple[list[int], list[int]]:
        """Return the device pages and the host slots of the owned ones of these pages."""
        owned = [page for page in pages if self.owns(page)]
        return [self._local(page) for page in owned], [self._slot(page) for page in owned]

    def _local(self, page: TierPage) -> int:
        assert page.device is not None, "a tier job without device pages"
        return local_page(self._row, page.device)

    def _slot(self, page: TierPage) -> int:
        assert page.host is not None, "a tier job without host pages"
        return page.host // self._row.sizes.cp

    def _read(self, pages: Sequence[TierPage], layers: range | None) -> None:
        """Read pages into the region from the host memory of the ranks that own them."""
        by_rank: dict[int, list[TierPage]] = {}
        for page in pages:
            by_rank.setdefault(page.index % self._row.sizes.cp, []).append(page)
        for cp_rank, owned in by_rank.items():
            source = self._peers[cp_rank].host_endpoint
            assert source is not None, f"CP rank {cp_rank} has no host memory"
            spans = [span for page in owned for span in self._spans(page, layers)]
            for start in range(0, len(spans), READ_SPANS):
                self._backend.read(source, self._memory.region, spans[start : start + READ_SPANS])

    def _spans(self, page: TierPage, layers: range | None) -> list[Span]:
        layout = self._row.layout
        return PageRange(layout, [self._slot(page)], layers).spans_to(PageRange(layout, [self._local(page)], layers))


def layer_groups(layers: range) -> Iterator[range]:
    """Divide the layers of a stage into groups of like size for a layerwise load."""
    size = -(-len(layers) // MOST_LAYER_GROUPS)
    return (layers[first : first + size] for first in range(0, len(layers), size))


def _wait(event: Event | None) -> None:
    if event is not None:
        event.synchronize()


def _is_peer(row: RankRow, mine: RankRow) -> bool:
    """Return whether a rank holds the same heads and layers of other pages."""
    here, there = mine.coords, row.coords
    return (here.dp, here.tp, here.pp) == (there.dp, there.tp, there.pp)
