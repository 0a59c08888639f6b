"""What an attention backend is: queries of some runs against paged keys and values, as a partial that can be merged."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from workers.context_parallel.merge import Partial
from workers.context_parallel.runs import Run


class StepAttention(Protocol):
    """Attention of one step on one rank, prepared once and called for every layer."""

    def attend(self, query: Tensor, key_pages: Tensor, value_pages: Tensor) -> Partial:
        """Attention of ``query [tokens, heads, dim]``, rows in the order of the runs, scale 1/sqrt(dim).

        ``key_pages`` and ``value_pages`` are one layer's ``[page, kv_head, slot, dim]``, strided; heads are a
        multiple of kv_heads. Which keys a query sees was said to ``prepare``. Returns new tensors: out in the
        query's dtype.
        """


class RowAttention(Protocol):
    """Attention of one rank's queries over keys that lie in rows, prepared once a step and called for every layer."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Partial:
        """Attention of ``query [tokens, heads, dim]`` over ``key`` and ``value [rows, kv_heads, dim]``, strided.

        Rows lie in the order of the runs given to ``prepare_rows``; scale 1/sqrt(dim). A query that sees no row has
        the empty partial. Returns new tensors: out in the query's dtype.
        """


class AttentionBackend(Protocol):
    """A way to compute attention; stateless, one for a worker."""

    def prepare(
        self,
        runs: Sequence[Run],
        page_tables: Sequence[Tensor],
        page_size: int,
        key_lens: Sequence[int] | None = None,
    ) -> StepAttention:
        """Lay out one step's work. ``page_tables[request]`` holds page numbers, int64, in order of position.

        Without ``key_lens`` a query at position p sees the request's keys at positions 0..p, causality being taken
        from the runs' positions alone; the pages up to a run's last position must be there. With it, every query of
        a request sees the first ``key_lens[request]`` keys in its pages, possibly none, whatever their positions.
        """

    def prepare_rows(self, query_runs: Sequence[Run], key_runs: Sequence[Run]) -> RowAttention:
        """Lay out one step's work over rows: a query sees the keys of its request at no later position.

        Where a run of queries and one of keys overlap in position, their steps are equal, or one is a single token.
        """
