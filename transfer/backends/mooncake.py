"""Transfers between hosts with Mooncake's transfer engine, over RDMA or over TCP with acknowledged writes."""

import json
import mmap
import os
import time
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

# The engine reads its log level when it is loaded; by default it logs every step to stderr.
os.environ.setdefault("MC_LOG_LEVEL", "ERROR")

from mooncake.engine import TransferEngine

from cluster.spec.config import TransferBackendName, TransferProtocol
from cluster.spec.errors import TransferError, UserError
from cluster.spec.registry import Endpoint
from transfer.backends.interface import Region
from transfer.page_range import Span, batches, check_bounds

_MAX_SPANS = 512
"""Maximum number of spans per batch; the TCP transport rejects about 4,000."""

# The transport aborts a stalled write after its own 30 s timeouts. This timeout must be longer: otherwise the call
# could return while the transport is still writing.
_CALL_TIMEOUT_S = 120
_LOOK_S = 0.1
"""Interval between checks of an asynchronous read."""


class MooncakeBackend:
    """Backend with one Mooncake engine per process. An endpoint's session is its owner's ``host:port``."""

    name = TransferBackendName.MOONCAKE
    # The engine aborts a stalled span after 30 s and then continues with the rest of the batch (see ``drain``). The
    # kernel still sends data that it had accepted by then, even if the process has died: Linux retransmits for 102 s
    # (tcp_orphan_retries) before it gives up, and the data arrives if the network recovers in that time. The receiving
    # engine reads from an open connection without checking permissions again.
    settle_s = 120.0

    def __init__(self, host: str, protocol: TransferProtocol) -> None:
        """Start the engine.

        Raises:
            UserError: the engine cannot listen on the host, RDMA is unavailable, or writes would not be acknowledged.
        """
        if os.environ.get("MC_TCP_PROTO") == "1":
            raise UserError("MC_TCP_PROTO is 1, which turns off acknowledged writes; unset it")
        if os.environ.get("MC_FORCE_TCP") and protocol is TransferProtocol.RDMA:
            raise UserError("transfer.protocol: got rdma, but MC_FORCE_TCP is set; unset it")
        os.environ.setdefault("MC_TRANSFER_TIMEOUT", str(_CALL_TIMEOUT_S))
        self._engine = TransferEngine()
        if self._engine.initialize(host, "P2PHANDSHAKE", protocol.value, "") != 0:
            raise UserError(f"transfer.backend: mooncake cannot listen on {host}; allowed: an address of this machine")
        self._protocol = protocol
        if protocol is TransferProtocol.RDMA and not _has_rdma(self._engine.get_local_topology()):
            raise UserError("transfer.protocol: got rdma, but mooncake finds no RDMA device on this host; allowed: tcp")
        self._session = f"{host}:{self._engine.get_rpc_port()}"
        self._owned: list[Region] = []

    def allocate(self, num_bytes: int) -> Region:
        """Allocate a region of private memory and register it with the engine."""
        try:
            buffer = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise UserError(f"cannot allocate {num_bytes} bytes of memory ({error.strerror})") from error
        address = int(np.frombuffer(buffer, dtype=np.uint8).ctypes.data)
        if self._engine.register_memory(address, num_bytes) != 0:
            raise UserError(
                f"transfer.backend: mooncake cannot register {num_bytes} bytes of memory; lower kv.memory_gib"
            )
        return self._own(memoryview(buffer), address, num_bytes)

    def register(self, address: int, num_bytes: int) -> Region:
        """Register GPU memory, which network cards access directly."""
        if self._protocol is not TransferProtocol.RDMA:
            # The engine would accept this memory and then copy it with the CPU, which cannot access it.
            raise TransferError(f"transfer.protocol: {self._protocol} supports only host memory")
        if (status := self._engine.register_memory(address, num_bytes)) != 0:
            raise TransferError(
                f"mooncake cannot register {num_bytes} bytes of GPU memory (status {status}); "
                "is the kernel module nvidia_peermem loaded?"
            )
        return self._own(memoryview(bytearray()), address, num_bytes)

    def _own(self, buffer: memoryview, address: int, num_bytes: int) -> Region:
        endpoint = Endpoint(backend=self.name, session=self._session, base_address=address, num_bytes=num_bytes)
        self._owned.append(Region(buffer, endpoint))
        return self._owned[-1]

    def write(self, source: Region, target: Endpoint, spans: Sequence[Span]) -> None:
        """Write spans to the peer's memory. Return once the peer has acknowledged them."""
        check_bounds(spans, source.endpoint.num_bytes, target.num_bytes, target)
        self._transfer("write", self._engine.batch_transfer_sync_write, source, target, spans)

    def read(self, source: Endpoint, target: Region, spans: Sequence[Span]) -> None:
        check_bounds(spans, source.num_bytes, target.endpoint.num_bytes, source)
        mirrored = [Span(ours, theirs, num_bytes) for theirs, ours, num_bytes in spans]
        self._transfer("read", self._engine.batch_transfer_sync_read, target, source, mirrored)

    def _transfer(
        self, verb: str, call: Callable[..., int], local: Region, peer: Endpoint, spans: Sequence[Span]
    ) -> None:
        """Transfer spans in either direction. Their source offsets refer to the local region."""
        for batch in batches(spans, _MAX_SPANS):
            status = call(
                peer.session,
                [local.endpoint.base_address + span.source_offset for span in batch],
                [peer.base_address + span.target_offset for span in batch],
                [span.num_bytes for span in batch],
            )
            if status != 0:
                raise TransferError(f"mooncake could not {verb} {len(batch)} spans; the peer is {peer.session}")

    def drain(self, peer: Endpoint) -> None:
        """Wait until the engine has tried every span of failed calls for a peer.

        A call fails with its first span. The engine keeps the others, and sends them when the network recovers. It
        handles a peer's spans in order, so they have all been tried when a read of one byte ends.
        """
        address = self._scratch.endpoint.base_address
        probe = self._engine.batch_transfer_async_read(peer.session, [address], [peer.base_address], [1])
        while probe and self._engine.transfer_check_status(probe) == 0:
            time.sleep(_LOOK_S)

    @cached_property
    def _scratch(self) -> Region:
        return self.allocate(mmap.PAGESIZE)

    def forget(self, target: Endpoint) -> None:
        """Do nothing: the engine closes connections to dead peers itself."""

    def close(self) -> None:
        """Unregister local memory, so that later writes from peers are rejected."""
        while self._owned:
            self._engine.unregister_memory(self._owned.pop().endpoint.base_address)


def _has_rdma(topology: str) -> bool:
    """Return whether the engine's topology has an RDMA device. Without one, the engine logs a warning and uses TCP."""
    return any(cards for near_and_far in json.loads(topology).values() for cards in near_and_far)
