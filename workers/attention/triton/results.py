"""Memory for results, which the kernels fill."""

import torch
from torch import Tensor

from workers.attention.merge import Partial
from workers.kernels.parts import Parts


def unwritten(query: Tensor, value_dim: int) -> Partial:
    """Allocate a result for ``query [T, heads, D]``."""
    shape = query.shape[:-1]
    return Partial(query.new_empty(*shape, value_dim), query.new_empty(shape, dtype=torch.float32))


def unwritten_parts(query: Tensor, value_dim: int, arrived: Tensor) -> Parts:
    """Allocate parts of a result for ``query [T, heads, D]``; ``arrived`` are their counters."""
    shape = (len(arrived), query.shape[1])
    found, lse = (query.new_empty(size, dtype=torch.float32) for size in ((*shape, value_dim), shape))
    return Parts(found, lse, arrived)
