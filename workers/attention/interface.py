"""Interface of attention backends. A call returns a partial result, which can be merged with others."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.attention.merge import Partial
from workers.attention.runs import Run
from workers.attention.selection import Chosen, IndexQueries, QueryRun
from workers.device import Device


class Feature(StrEnum):
    """Feature that only some backends support."""

    WINDOW = "sliding windows"
    WIDE_KEYS = "keys wider than 256 elements, or than 576 with their values inside"
    SMALL_MEMORY = "latents wider than 256 elements on a GPU with less than 152 KiB of shared memory"


@dataclass(frozen=True, slots=True, eq=False)
class AttentionParams:
    """Attention parameters of one layer, passed with every call."""

    scale: float
    """Factor applied to products of queries and keys."""
    window: int | None = None
    """Number of most recent keys that a query sees, including the key of its own token. None if it sees all."""
    value_dim: int | None = None
    """Width of values that are the first elements of their keys, as in latent attention. None if values are stored
    apart.
    """
    sinks: Tensor | None = None
    """``[heads]`` fp32: one scaled score per head, which takes part in the softmax but has no value. Only ``merge``
    applies them, since each must count only once per query.
    """

    def key_and_value(self, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer that stores ``parts [..., dim]``: K and V, or first a part for both."""
        return parts[0], parts[1] if self.value_dim is None else parts[0][..., : self.value_dim]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionShape:
    """Shape of a layer's attention on one rank, and the parameters that the layer passes with every call."""

    num_heads: int
    num_kv_heads: int
    query_dim: int
    """Width of a query, and of a key."""
    value_dim: int
    params: AttentionParams

    @property
    def pair_flops(self) -> int:
        """Return the FLOPs of one (query, key) pair, over all heads."""
        return 2 * self.num_heads * (self.query_dim + self.value_dim)


class StepAttention(Protocol):
    """Attention of one step on one rank, prepared once and called for every layer."""

    def attend(self, query: Tensor, key_pages: Tensor, value_pages: Tensor, params: AttentionParams) -> Partial:
        """Return attention of ``query [tokens, heads, D]``, with rows in the order of the runs.

        ``key_pages [page, kv_head, slot, D]`` and ``value_pages [page, kv_head, slot, V]`` are strided views of one
        layer. ``prepare`` determines the keys that a query sees; a window in ``params`` keeps only the latest of them.
        Returns new tensors: out ``[tokens, heads, V]`` in the query's dtype.
        """


class RowAttention(Protocol):
    """Attention of one rank's queries over keys stored in rows, prepared once per step and called for every layer."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Partial:
        """Return attention of ``query [tokens, heads, D]`` over strided ``key [rows, kv_heads, D]`` and ``value``.

        Rows are in the order of the runs given to ``prepare_rows``. A query that sees no row gets the empty partial.
        Returns new tensors: out ``[tokens, heads, V]`` in the query's dtype.
        """


class StepSelection(Protocol):
    """Selection of keys for the queries of one step on one rank, prepared once and called for every layer."""

    batches: Sequence[slice]
    """Ranges of queries, one for each call of ``best_keys``."""

    def best_keys(self, index: IndexQueries, keys: Tensor, batch: slice, top_k: int) -> Chosen:
        """Return the best keys of a batch's queries, by number: all visible ones, or ``top_k``.

        ``index`` are the queries of the step, and ``keys [page, 1, slot, dim]`` the indexer's. Of equal scores, the
        first ones are best. A score is -inf where a query sees fewer keys than others.
        """

    def attend(self, query: Tensor, keys: Tensor, selected: Tensor, params: AttentionParams) -> Partial:
        """Return attention of ``query [queries, heads, D]``, each to keys of its own, in the query's dtype.

        ``selected [queries, n]`` int32 are the keys' numbers, followed by ``NO_KEY``. The first ``params.value_dim``
        elements of ``keys [page, 1, slot, D]`` are the values.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphShape:
    """Sizes of the decode steps that one captured graph supports."""

    num_requests: int
    most_pages: int
    """Maximum number of pages per request."""
    page_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Width of a query, and of a key."""
    value_dim: int
    dtype: torch.dtype
    device: Device


class GraphAttention(Protocol):
    """Attention of one token per request, with inputs at fixed addresses, so that a graph can capture it."""

    def fill(self, num_keys: Sequence[int], tables: Sequence[NDArray[np.int64]]) -> None:
        """Set the inputs of the next replay. Asynchronous on a GPU.

        ``num_keys`` holds the number of keys, at least one, that each request's token sees. ``tables`` holds each
        request's page numbers.
        """

    def attend(self, query: Tensor, key_pages: Tensor, value_pages: Tensor, params: AttentionParams) -> Partial:
        """Return attention of ``query [requests, heads, D]``. See StepAttention."""

    def best_keys(self, index: IndexQueries, keys: Tensor, top_k: int) -> Tensor:
        """Return the numbers of each request's best keys, int32 ``[requests, top_k]``, followed by ``NO_KEY``. See
        ``StepSelection``.
        """

    def attend_selected(self, query: Tensor, keys: Tensor, selected: Tensor, params: AttentionParams) -> Partial:
        """Return attention of ``query [requests, heads, D]`` to keys that ``best_keys`` has returned."""


class AttentionBackend(Protocol):
    """Attention implementation. Stateless, one per worker."""

    def prepare(
        self, runs: Sequence[Run], page_tables: Sequence[Tensor], page_size: int, key_lens: Sequence[int] | None = None
    ) -> StepAttention:
        """Prepare one step. ``page_tables[request]`` holds int64 page numbers in order of position.

        Without ``key_lens``, a query at position p sees the request's keys at positions 0..p, and the page table must
        cover them. With ``key_lens``, every query of a request sees the first ``key_lens[request]`` keys in its pages,
        possibly none, regardless of position. With a window, these keys start at position 0, and none is later than a
        query.
        """

    def prepare_rows(self, query_runs: Sequence[Run], key_runs: Sequence[Run]) -> RowAttention:
        """Prepare one step over rows. A query sees its request's keys up to its own position.

        Query and key runs that overlap in position must have equal steps, unless one of them is a single token. With a
        window, this includes runs that do not overlap.
        """

    def prepare_graph(self, shape: GraphShape) -> GraphAttention | None:
        """Return attention that a CUDA graph can capture. None if this backend does not support capture."""

    def prepare_selection(self, runs: Sequence[QueryRun], most_queries: int | None = None) -> StepSelection:
        """Prepare one step. ``most_queries`` limits the number of queries in a batch, by default for speed."""
