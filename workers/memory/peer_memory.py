"""Memory of one rank's pages in addition to its pool: the region that peers access, and the host tier."""

import logging
from collections.abc import Sequence

import torch

from cluster.spec.errors import TransferError
from cluster.spec.kv import PoolLayout
from cluster.spec.registry import Verify
from transfer.backends.interface import Region, TransferBackend
from transfer.page_range import PageRange, batches
from workers.device import Device, Event
from workers.memory.copy import PageMemory, Pages, copy
from workers.memory.page_pool import PagePool
from workers.parallel.communicator import Communicator

_ORDERS_WRITES = (9, 0)
"""Lowest compute capability whose GPUs see a network card's writes in order. NCCL flushes on older GPUs."""
_MOST_SPREAD_BYTES = 64 << 20
"""Maximum number of bytes per broadcast, which needs as much memory in addition to the pool."""

_log = logging.getLogger(__name__)


class PeerMemory:
    """Pool of one rank, and the memory region through which peers read and write its pages.

    A page has the same index in both. If pool and region are separate, computed pages are copied to the region, and
    received pages to the pool before anything reads them.
    """

    def __init__(self, pool: PagePool, region: Region, head_copies: Communicator | None = None) -> None:
        """Use a separate host copy if ``region`` has a host buffer that is not the pool itself.

        Args:
            head_copies: ranks of a decode replica that hold the same heads, by TP rank. Each receives its part of the
                pages (``transfer.page_assignment.PageShare``).
        """
        self.pool = pool
        self.region = region
        self.host = _host_copy(pool, region)
        """Pages that peers access, if separate from the pool."""
        self._head_copies = head_copies
        self._stream = pool.device.copy_stream()

    def event(self) -> Event | None:
        """Record an event on the computing thread, after all work that it has started so far."""
        return self.pool.device.record_event()

    def publish(self, pages: PageRange, after: Event | None) -> None:
        """Make pages visible to peers when ``after`` completes. Once this returns, the pages can be sent."""
        if self.host is None:
            if after is not None:
                after.synchronize()
            return
        source, target = (Pages(memory.bytes, pages) for memory in (self.pool, self.host))
        if (copied := copy(source, target, after, self._stream)) is not None:
            copied.synchronize()

    def receive(self, pages: Sequence[int]) -> None:
        """Copy to the pool the pages that peers wrote, before any work that the computing thread starts from now on.

        Every rank with the same heads must call this with the same pages.
        """
        if self.host is not None:
            copy(self.host.at(pages), self.pool.at(pages))
        if self._head_copies is not None:
            self._spread(pages, self._head_copies)

    def _spread(self, pages: Sequence[int], group: Communicator) -> None:
        """Broadcast pages within the group. Page p was sent to member p modulo the group's size."""
        most = max(1, _MOST_SPREAD_BYTES // self.pool.page_bytes)
        for member in range(group.size if group.size > 1 else 0):
            for part in batches([page for page in pages if page % group.size == member], most):
                content = PageMemory(self.pool.bytes.new_empty(len(part) * self.pool.page_bytes), self.pool.layout)
                whole = content.at(range(len(part)))
                if member == group.rank:
                    copy(self.pool.at(part), whole)
                group.broadcast(content.bytes, member)
                if member != group.rank:
                    copy(whole, self.pool.at(part))


class TierMemory:
    """Copies between one rank's pages and its slots in the host tier.

    On a GPU, copies between the pool and pinned host memory run on separate streams. Pages read from peers pass through
    the transfer region if it is separate from the pool. Saved pages bypass the region, since peers may be writing to
    it.
    """

    def __init__(self, memory: PeerMemory, host: Region) -> None:
        """Use ``host`` as this rank's part of the host tier, which peers read."""
        self.region = memory.region
        """Destination of pages read from peers."""
        self._memory = memory
        self._host = PageMemory(torch.frombuffer(host.buffer, dtype=torch.uint8), memory.pool.layout)
        self._host_bytes = host.buffer
        device = memory.pool.device
        self._inward, self._outward = device.copy_stream(), device.copy_stream()

    def record_event(self) -> Event | None:
        """Record the event after which a new job's copies start. Call this on the computing thread."""
        return self._memory.event()

    def host_page(self, slot: int) -> memoryview:
        page_bytes = self._memory.pool.page_bytes
        return self._host_bytes[slot * page_bytes : (slot + 1) * page_bytes]

    def save(self, pages: Sequence[int], slots: Sequence[int], after: Event | None) -> None:
        """Copy pages to slots. The copy is complete on return."""
        saved = copy(self._memory.pool.at(pages), self._host.at(slots), after, self._outward)
        if saved is not None:
            saved.synchronize()

    def load(
        self, pages: Sequence[int], slots: Sequence[int], lifetime: int, layers: range | None, after: Event | None
    ) -> Event | None:
        """Copy all or some layers of slots to pages of a lifetime. The returned event completes with the copy."""
        source, target = self._host.at(slots, layers, lifetime), self._memory.pool.at(pages, layers, lifetime)
        return copy(source, target, after, self._inward)

    def take_in(self, pages: Sequence[int], lifetime: int, layers: range | None, after: Event | None) -> Event | None:
        """Copy to the pool the pages that were read into the region from peers, if region and pool are separate."""
        if self._memory.host is None:
            return after
        source, target = (memory.at(pages, layers, lifetime) for memory in (self._memory.host, self._memory.pool))
        return copy(source, target, after, self._inward)

    def wait_loads(self) -> None:
        if self._inward is not None:
            self._inward.synchronize()


def open_peer_memory(
    layout: PoolLayout, device: Device, backend: TransferBackend, verify: Verify, head_copies: Communicator | None
) -> PeerMemory:
    """Allocate a pool. On a CPU, the pool is the region itself; on a GPU, see ``open_apart``."""
    if device.has_own_memory:
        return open_apart(layout, device, backend, verify, head_copies)
    region = backend.allocate(layout.pool_bytes)
    return PeerMemory(PagePool(layout, torch.frombuffer(region.buffer, dtype=torch.uint8)), region, head_copies)


def open_apart(
    layout: PoolLayout,
    device: Device,
    backend: TransferBackend,
    verify: Verify,
    head_copies: Communicator | None = None,
) -> PeerMemory:
    """Allocate a pool in device memory. Peers access it directly if the backend allows that, else through the host."""
    memory = torch.zeros(layout.pool_bytes, dtype=torch.uint8, device=device.torch_device)
    pool = PagePool(layout, memory)
    try:
        _check_reachable(device, verify)
        region = backend.register(memory.data_ptr(), memory.nbytes)
    except TransferError as reason:
        _log.info("KV transfer uses a host buffer of the pool's size: %s", reason)
        region = backend.allocate(layout.pool_bytes)
    else:
        _log.info("KV transfer runs directly between GPUs")
    return PeerMemory(pool, region, head_copies)


def _host_copy(pool: PagePool, region: Region) -> PageMemory | None:
    if not region.buffer.nbytes:
        return None
    memory = torch.frombuffer(region.buffer, dtype=torch.uint8)
    return None if memory.data_ptr() == pool.bytes.data_ptr() else PageMemory(memory, pool.layout)


def _check_reachable(device: Device, verify: Verify) -> None:
    """Raise TransferError if peers cannot safely write to this GPU's memory."""
    if verify is Verify.DIGEST:
        raise TransferError("transfer.verify: digest needs pages in host memory")
    if (found := device.compute_capability) is not None and found < _ORDERS_WRITES:
        raise TransferError(
            f"a GPU with compute capability {found[0]}.{found[1]} may see a network card's writes too late; "
            f"required: {_ORDERS_WRITES[0]}.{_ORDERS_WRITES[1]} or higher"
        )
