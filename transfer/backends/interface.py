"""Interface of transfer backends. A backend copies bytes and knows nothing about pages or requests."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.spec.config import TransferBackendName
from cluster.spec.registry import Endpoint
from transfer.page_range import Span


@dataclass(frozen=True, slots=True)
class Region:
    """Memory of this process that peers may read and write."""

    buffer: memoryview
    """Writable bytes, initially zero. They stay valid while referenced, even after the backend is closed. Empty for
    device memory, which the CPU cannot access.
    """
    endpoint: Endpoint
    """Address that a peer passes to ``write`` and ``read``."""


class TransferBackend(Protocol):
    """Backend that copies spans between regions of different processes.

    One thread calls ``write`` and ``forget``, another calls ``read``, and the main thread calls the other methods.
    """

    name: TransferBackendName

    settle_s: float
    """Time after a failed write or a writer's death during which bytes may still arrive at the target."""

    def allocate(self, num_bytes: int) -> Region:
        """Allocate a region that peers can access.

        Raises:
            UserError: not enough memory is available.
        """
        ...

    def register(self, address: int, num_bytes: int) -> Region:
        """Make GPU memory accessible to peers. The caller must keep it allocated until the backend is closed.

        Raises:
            TransferError: peers cannot access the memory.
        """
        ...

    def write(self, source: Region, target: Endpoint, spans: Sequence[Span]) -> None:
        """Copy spans from a local region to a peer's region. Block with the GIL released until all bytes have arrived.

        Raises:
            TransferError: some of the spans may not have been written.
        """
        ...

    def read(self, source: Endpoint, target: Region, spans: Sequence[Span]) -> None:
        """Copy spans from a peer's region to a local region. Block with the GIL released until all bytes have arrived.

        Raises:
            TransferError: some of the spans may not have been read.
        """
        ...

    def drain(self, peer: Endpoint) -> None:
        """Block until failed calls for a peer move no more bytes, except those that ``settle_s`` allows for."""
        ...

    def forget(self, target: Endpoint) -> None:
        """Release the resources held for a dead peer."""
        ...

    def close(self) -> None:
        """End peers' access to all regions and forget all peers. Safe to call twice."""
        ...
