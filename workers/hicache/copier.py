"""Copies between the device pool and the host pools of a replica. Moves bytes, knows no keys."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cluster.spec.registry import KvOwnership, RankRow
from cluster.spec.tiers import TierPage
from transfer.backends.interface import Region, TransferBackend
from transfer.plan import Span, local_page

READ_SPANS = 64
"""Most pages read from a peer in one call."""


class Copier:
    """One rank's. A host page belongs to one CP rank; where KV is replicated, the others read it from there."""

    def __init__(
        self, rows: Sequence[RankRow], rank: int, device: Region, host: Region, backend: TransferBackend
    ) -> None:
        """``rows`` are those of all ranks of the replica; ``device`` and ``host`` are the memory of this one."""
        self._row = rows[rank]
        self._backend = backend
        self._device = device
        self._page_bytes = self._row.layout.page_bytes
        self._device_pages = self._pages(device, self._row.layout.num_pages)
        self._host_pages = self._pages(host, len(host.buffer) // self._page_bytes)
        self._peers = {row.coords.cp: row for row in rows if _is_peer(row, self._row)}

    @property
    def page_bytes(self) -> int:
        """Bytes of one page on this rank."""
        return self._page_bytes

    def owns(self, page: TierPage) -> bool:
        """Whether the page's copy in host memory is this rank's."""
        return page.place % self._row.sizes.cp == self._row.coords.cp

    def host_page(self, page: TierPage) -> memoryview:
        """The bytes of a host page that this rank owns."""
        assert page.host is not None, "an order without host pages"
        return memoryview(self._host_pages[page.host // self._row.sizes.cp])

    def save(self, pages: Sequence[TierPage]) -> int:
        """Copy the owned ones of these pages to host memory; the bytes copied."""
        owned = [page for page in pages if self.owns(page)]
        for page in owned:
            assert page.device is not None, "an order without device pages"
            np.copyto(np.asarray(self.host_page(page)), self._device_pages[local_page(self._row, page.device)])
        return len(owned) * self._page_bytes

    def load(self, pages: Sequence[TierPage]) -> int:
        """Fill the device pages that this rank has of these; the bytes copied.

        Raises:
            TransferError: a peer's memory cannot be read.
        """
        if self._row.ownership is KvOwnership.SHARDED:
            pages = [page for page in pages if self.owns(page)]
        spans: dict[int, list[Span]] = {}
        for page in pages:
            assert page.device is not None, "an order without device pages"
            device = local_page(self._row, page.device)
            if self.owns(page):
                np.copyto(self._device_pages[device], np.asarray(self.host_page(page)))
            else:
                spans.setdefault(page.place % self._row.sizes.cp, []).append(self._span(page, device))
        for cp_rank, wanted in spans.items():
            self._read(cp_rank, wanted)
        return len(pages) * self._page_bytes

    def _span(self, page: TierPage, device: int) -> Span:
        assert page.host is not None, "an order without host pages"
        host = page.host // self._row.sizes.cp
        return Span(host * self._page_bytes, device * self._page_bytes, self._page_bytes)

    def _read(self, cp_rank: int, spans: list[Span]) -> None:
        source = self._peers[cp_rank].host_endpoint
        assert source is not None, f"CP rank {cp_rank} has no host memory"
        for start in range(0, len(spans), READ_SPANS):
            self._backend.read(source, self._device, spans[start : start + READ_SPANS])

    def _pages(self, region: Region, num_pages: int) -> npt.NDArray[np.uint8]:
        flat = np.frombuffer(region.buffer, dtype=np.uint8)
        return flat[: num_pages * self._page_bytes].reshape(num_pages, self._page_bytes)


def _is_peer(row: RankRow, mine: RankRow) -> bool:
    """Whether a rank holds the same heads and layers of other pages."""
    here, there = mine.coords, row.coords
    return (here.dp, here.tp, here.pp) == (there.dp, there.tp, there.pp)
