"""Copies between one rank's pool and its part of the host tier."""

from collections.abc import Sequence

import torch

from transfer.backends.interface import Region
from workers.device import Event
from workers.memory.copy import PageMemory, copy, copy_stream
from workers.memory.peer_memory import PeerMemory


class TierMemory:
    """Copies between the pages of one rank and its slots of the host tier.

    On a GPU, copies between the pool and pinned host memory run on their own streams. Pages read from peers pass
    through the transfer region if that is separate; saved pages do not, since peers may be writing to it.
    """

    def __init__(self, memory: PeerMemory, host: Region) -> None:
        """Use ``host`` as this rank's part of the host tier, which peers read."""
        self.region = memory.region
        """Destination of pages read from peers."""
        self._memory = memory
        self._host = PageMemory(torch.frombuffer(host.buffer, dtype=torch.uint8), memory.pool.layout)
        self._host_bytes = host.buffer
        device = memory.pool.bytes.device
        self._inward, self._outward = copy_stream(device), copy_stream(device)

    def record_event(self) -> Event | None:
        """Record the event after which a new job's copies start; call it on the computing thread."""
        return self._memory.event()

    def host_page(self, slot: int) -> memoryview:
        page_bytes = self._memory.pool.page_bytes
        return self._host_bytes[slot * page_bytes : (slot + 1) * page_bytes]

    def save(self, pages: Sequence[int], slots: Sequence[int], after: Event | None) -> None:
        """Copy pages to slots; complete on return."""
        saved = copy(self._memory.pool.at(pages), self._host.at(slots), after, self._outward)
        if saved is not None:
            saved.synchronize()

    def load(
        self, pages: Sequence[int], slots: Sequence[int], lifetime: int, layers: range | None, after: Event | None
    ) -> Event | None:
        """Copy all or some layers of slots to pages of a lifetime; the returned event completes with the copy."""
        source, target = self._host.at(slots, layers, lifetime), self._memory.pool.at(pages, layers, lifetime)
        return copy(source, target, after, self._inward)

    def take_in(self, pages: Sequence[int], lifetime: int, layers: range | None, after: Event | None) -> Event | None:
        """Copy pages read from peers from the region to the pool, if the two are separate."""
        if self._memory.host is None:
            return after
        source, target = (memory.at(pages, layers, lifetime) for memory in (self._memory.host, self._memory.pool))
        return copy(source, target, after, self._inward)

    def wait_loads(self) -> None:
        if self._inward is not None:
            self._inward.synchronize()
