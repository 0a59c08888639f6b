"""A worker whose pool is apart from the memory that peers reach, as a GPU's is, on the CPU."""

import torch

from cluster.spec.kv import PoolLayout
from transfer.backends.interface import Region
from workers import rank
from workers.cache.page_pool import PagePool
from workers.cache.staging import Staging
from workers.worker import Worker


def _pool_apart(layout: PoolLayout, dtype: torch.dtype, region: Region, device: torch.device) -> PagePool:
    sizes = (layout.num_pages, layout.num_heads, layout.num_layers, layout.page_size, layout.head_dim)
    return PagePool(*sizes, dtype, torch.zeros(len(region.buffer), dtype=torch.uint8, device=device))


def _staging(pool: PagePool, region: Region) -> Staging:
    return Staging(pool, region.buffer)


class WorkerWithStagedPool(Worker):
    """Its module, which only its process imports, puts the pool in place."""


rank._make_pool = _pool_apart
rank._make_staging = _staging
