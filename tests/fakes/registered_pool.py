"""A worker whose peers reach a pool that the transfer backend did not allocate, as a GPU's over RDMA, on the CPU.

Mooncake over TCP moves its bytes, which it can since the pool is the CPU's after all.
"""

from typing import Any
from unittest.mock import patch

from cluster.spec.config import TransferBackendName, TransferProtocol
from tests.fakes.eager_worker import EagerWorker
from transfer.backends.interface import TransferBackend, make_backend
from workers import rank
from workers.memory.peer_memory import open_apart


class WorkerWithRegisteredPool(EagerWorker):
    """Its module, which only its process imports, puts the pool in place."""

    def load(self, store_address: str) -> Any:
        """See Worker."""
        row = super().load(store_address)
        assert self._rank is not None
        assert self._rank.memory.host is None, "pages are copied"
        assert row.endpoint.base_address == self._rank.memory.pool.bytes.data_ptr()
        return row


def _make(name: TransferBackendName, host: str, _: TransferProtocol) -> TransferBackend:
    from transfer.backends.mooncake import MooncakeBackend

    backend = make_backend(name, host)
    assert isinstance(backend, MooncakeBackend)
    backend._protocol = TransferProtocol.RDMA
    return backend


patch.object(rank, "open_peer_memory", open_apart).start()
patch.object(rank, "make_backend", _make).start()
