"""Interface and selection of transfer backends, which move bytes and do not know pages, rooms or states."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.spec.config import TransferBackendName, TransferProtocol
from cluster.spec.errors import TransferError, UserError
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

    ``write`` and ``forget`` are called by one thread, ``read`` by another, the rest by the main thread.
    """

    name: TransferBackendName

    settle_s: float
    """Seconds after a failed write, or a writer's death, in which bytes may still arrive at the target."""

    def allocate(self, num_bytes: int) -> Region:
        """Allocate a region and open it to peers.

        Raises:
            UserError: there is too little memory.
        """
        ...

    def register(self, address: int, num_bytes: int) -> Region:
        """Open GPU memory to peers; its owner keeps it until the backend is closed.

        Raises:
            TransferError: peers cannot access it; the message says why.
        """
        ...

    def write(self, source: Region, target: Endpoint, spans: Sequence[Span]) -> None:
        """Copy spans of a local region to a peer's; block until they have arrived, without holding the GIL.

        Raises:
            TransferError: some of the spans may not have been written.
        """
        ...

    def read(self, source: Endpoint, target: Region, spans: Sequence[Span]) -> None:
        """Copy spans of a peer's region to a local one; block until they have arrived, without holding the GIL.

        Raises:
            TransferError: some of the spans may not have been read.
        """
        ...

    def forget(self, target: Endpoint) -> None:
        """Release resources held for a peer that is gone."""
        ...

    def close(self) -> None:
        """Close all regions to peers and forget all peers; safe to call twice."""
        ...


def make_backend(
    name: TransferBackendName, host: str, protocol: TransferProtocol = TransferProtocol.TCP
) -> TransferBackend:
    """Return the named backend, at an address that peers can reach.

    Raises:
        UserError: a requirement of the backend is not installed or not available.
    """
    if name is TransferBackendName.SHARED_MEMORY:
        from transfer.backends.shared_memory import SharedMemoryBackend

        return SharedMemoryBackend()
    try:
        from transfer.backends.mooncake import MooncakeBackend
    except ImportError as error:
        raise UserError(
            f"transfer.backend: mooncake cannot be loaded ({error}); it needs the Python package "
            "mooncake-transfer-engine-non-cuda and the Debian packages libibverbs1 librdmacm1 libnuma1"
        ) from error
    return MooncakeBackend(host, protocol)


def check_bounds(spans: Sequence[Span], source_bytes: int, target_bytes: int, peer: Endpoint) -> None:
    """Check that spans lie within both regions, one of which is the peer's.

    Raises:
        TransferError: names the first span that does not.
    """
    for span in spans:
        if span.num_bytes < 0 or not 0 <= span.source_offset <= source_bytes - span.num_bytes:
            raise TransferError(f"{peer.session}: {span} does not lie in the {source_bytes} bytes of the source")
        if not 0 <= span.target_offset <= target_bytes - span.num_bytes:
            raise TransferError(f"{peer.session}: {span} does not lie in the {target_bytes} bytes of the target")
