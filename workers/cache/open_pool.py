"""A page pool, and the memory by which peers reach its pages: the same memory wherever they can be let there."""

import logging
from typing import NamedTuple

import torch

from cluster.spec.errors import TransferError
from cluster.spec.kv import PoolLayout
from cluster.spec.registry import Verify
from transfer.backends.interface import Region, TransferBackend
from workers.cache.page_pool import PagePool
from workers.cache.registered_pages import RegisteredPages
from workers.cache.staging import Staging

_ORDERS_WRITES = (9, 0)

_log = logging.getLogger(__name__)


class OpenPool(NamedTuple):
    """Of one worker."""

    pool: PagePool
    """On the device."""
    region: Region
    """What peers write to and read from."""
    staging: Staging | RegisteredPages | None
    """Between the two, on a GPU."""


def open_pool(
    layout: PoolLayout, dtype: torch.dtype, device: torch.device, backend: TransferBackend, verify: Verify
) -> OpenPool:
    """In the region itself on a CPU, in a GPU's own memory on one."""
    if device.type == "cuda":
        return open_apart(layout, dtype, device, backend, verify)
    region = backend.allocate(layout.pool_bytes)
    return OpenPool(_pool(layout, dtype, torch.frombuffer(region.buffer, dtype=torch.uint8)), region, None)


def open_apart(
    layout: PoolLayout, dtype: torch.dtype, device: torch.device, backend: TransferBackend, verify: Verify
) -> OpenPool:
    """In memory of the device, which peers reach where the backend lets them, and else by way of the host."""
    memory = torch.zeros(layout.pool_bytes, dtype=torch.uint8, device=device)
    pool = _pool(layout, dtype, memory)
    try:
        _check_reachable(device, verify)
        region = backend.register(memory.data_ptr(), memory.nbytes)
    except TransferError as reason:
        _log.info("pages go through host memory as large as the pool: %s", reason)
        region = backend.allocate(layout.pool_bytes)
        return OpenPool(pool, region, Staging(pool, region.buffer))
    _log.info("pages go from GPU to GPU, whose memory is registered")
    return OpenPool(pool, region, RegisteredPages(pool))


def _check_reachable(device: torch.device, verify: Verify) -> None:
    """Raises TransferError where peers may be let into a GPU's memory, but what they write there could not be used."""
    if verify is Verify.DIGEST:
        raise TransferError("transfer.verify: digest reads pages on the host")
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < _ORDERS_WRITES:
        # As NCCL has it, which flushes after what it receives on older ones.
        raise TransferError(
            f"a GPU of compute capability {found[0]}.{found[1]} may see what a network card wrote later than the host; "
            f"from {_ORDERS_WRITES[0]}.{_ORDERS_WRITES[1]} on it does not"
        )


def _pool(layout: PoolLayout, dtype: torch.dtype, memory: torch.Tensor) -> PagePool:
    sizes = (layout.num_pages, layout.num_heads, layout.num_layers, layout.page_size, layout.head_dim)
    return PagePool(*sizes, dtype, memory)
