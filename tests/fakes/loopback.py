"""Transfer backend inside one process. Regions are byte arrays, and tests can delay or fail writes."""

import threading
from collections.abc import Sequence

from cluster.spec.config import TransferBackendName
from cluster.spec.errors import TransferError
from cluster.spec.registry import Endpoint
from transfer.backends.interface import Region
from transfer.page_range import Span, check_bounds


class Loopback:
    """Backend for any number of regions, which can all reach each other."""

    name = TransferBackendName.SHARED_MEMORY
    settle_s = 0.0

    def __init__(self) -> None:
        self.memory: dict[str, bytearray] = {}
        self.batch_sizes: list[int] = []
        self.forgotten: list[str] = []
        self.failing: set[str] = set()
        """Sessions to which writes fail."""
        self.flips: set[int] = set()
        """Target offsets at which written bytes are corrupted."""
        self.gate = threading.Event()
        """Gate that writes wait for. It is open at first."""
        self.gate.set()
        self.drained = threading.Event()
        """Event that ends ``drain``. It is set at first."""
        self.drained.set()
        self.is_writing = threading.Event()
        """Event that is set once a write waits at the gate."""

    def allocate(self, num_bytes: int) -> Region:
        session = f"loopback-{len(self.memory)}"
        self.memory[session] = bytearray(num_bytes)
        endpoint = Endpoint(backend="loopback", session=session, base_address=0, num_bytes=num_bytes)
        return Region(memoryview(self.memory[session]), endpoint)

    def register(self, address: int, num_bytes: int) -> Region:  # noqa: ARG002
        raise TransferError("byte arrays only")

    def write(self, source: Region, target: Endpoint, spans: Sequence[Span]) -> None:
        self.is_writing.set()
        assert self.gate.wait(10)
        if target.session in self.failing:
            raise TransferError(f"{target.session} fails")
        check_bounds(spans, len(source.buffer), target.num_bytes, target)
        self.batch_sizes.append(len(spans))
        for source_offset, target_offset, num_bytes in spans:
            self.memory[target.session][target_offset : target_offset + num_bytes] = source.buffer[
                source_offset : source_offset + num_bytes
            ]
            for offset in self.flips & set(range(target_offset, target_offset + num_bytes)):
                self.memory[target.session][offset] ^= 1

    def read(self, source: Endpoint, target: Region, spans: Sequence[Span]) -> None:
        if source.session in self.failing:
            raise TransferError(f"{source.session} fails")
        check_bounds(spans, source.num_bytes, len(target.buffer), source)
        for source_offset, target_offset, num_bytes in spans:
            target.buffer[target_offset : target_offset + num_bytes] = self.memory[source.session][
                source_offset : source_offset + num_bytes
            ]

    def drain(self, peer: Endpoint) -> None:  # noqa: ARG002
        assert self.drained.wait(10)

    def forget(self, target: Endpoint) -> None:
        self.forgotten.append(target.session)

    def close(self) -> None:
        self.memory.clear()
