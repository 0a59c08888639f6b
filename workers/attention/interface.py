"""What an attention backend is: queries of some runs against paged keys and values, as a partial that can be merged."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from workers.context_parallel.merge import Partial
from workers.context_parallel.runs import Run


class StepAttention(Protocol):
    """Attention of one step on one rank, prepared once and called for every layer."""

    def attend(self, query: Tensor, key_pages: Tensor, value_pages: Tensor) -> Partial:
        """Causal attention of ``query [tokens, heads, dim]``, rows in the order of the runs, scale 1/sqrt(dim).

        ``key_pages`` and ``value_pages`` are one layer's ``[page, kv_head, slot, dim]``, strided; heads are a
        multiple of kv_heads. A query at position p sees the request's keys at positions 0..p. Returns new
        tensors: out in the query's dtype.
        """


class AttentionBackend(Protocol):
    """A way to compute attention; stateless, one for a worker."""

    def prepare(self, runs: Sequence[Run], page_tables: Sequence[Tensor], page_size: int) -> StepAttention:
        """Lay out one step's work. ``page_tables[request]`` holds page numbers, int64, in order of position.

        The pages up to a run's last position must be there; causality is taken from the runs' positions alone.
        """
