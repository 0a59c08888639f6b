"""Attention on a CPU with the compiled code of attention.h, which reads keys and values in place."""

from collections.abc import Sequence
from itertools import accumulate, chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.attention.interface import AttentionParams, GraphAttention, GraphShape, RowAttention, StepAttention
from workers.attention.limits import MOST_SELECTED
from workers.attention.merge import Partial, empty_partial, unwritten_partial
from workers.attention.runs import Piece, Run, paged_pieces, row_pieces
from workers.attention.selection import Chosen, IndexQueries
from workers.attention.torch_selection import TorchSelection, counted
from workers.native.compile import Compiler
from workers.native.library import MOST_INDEX_HEADS, NUM_ITEM_FIELDS, Library

_ONE_PAGE = 1 << 62
"""Page size so large that keys stored in rows all lie in one page."""
_FIRST_PAGE = torch.zeros(1, dtype=torch.int64)


class NativeAttention(TorchSelection):
    """Attention that neither copies keys nor merges within a run. Stateless. It uses as many threads as torch does."""

    queries_at_once = 512

    def __init__(self, compiler: Compiler | None = None) -> None:
        """Compile the library if this machine does not have it yet. Raises CannotCompileError if that fails."""
        self._library = Library.load(compiler)

    def prepare(
        self, runs: Sequence[Run], page_tables: Sequence[Tensor], page_size: int, key_lens: Sequence[int] | None = None
    ) -> StepAttention:
        lens = [len(table) for table in page_tables]
        pieces, first_entries = paged_pieces(runs, key_lens), list(accumulate(lens, initial=0))
        for piece in pieces:
            assert piece.key.stop <= lens[piece.request] * page_size, f"{piece} ends past its pages"
        items = _items(pieces, [first_entries[piece.request] for piece in pieces])
        return _NativeStep(self._library, pieces, items, torch.cat([_FIRST_PAGE[:0], *page_tables]), page_size)

    def prepare_rows(self, query_runs: Sequence[Run], key_runs: Sequence[Run]) -> RowAttention:
        return _NativeRows(self._library, row_pieces(query_runs, key_runs))

    def prepare_graph(self, shape: GraphShape) -> GraphAttention | None:
        """Return attention for captured steps. None for latents, of which some models select keys."""
        return _NativeGraph(self._library, shape) if shape.head_dim == shape.value_dim else None

    def best_keys(
        self, index: IndexQueries, keys: Tensor, table: Tensor, num_visible: NDArray[np.int64], top_k: int
    ) -> Chosen:
        if index.q.shape[1] > MOST_INDEX_HEADS:
            return super().best_keys(index, keys, table, num_visible, top_k)
        assert int(num_visible[-1]) <= len(table) * keys.shape[2], f"{num_visible[-1]} keys in {len(table)} pages"
        query, weights = index.q.to(keys.dtype), index.weights.contiguous()
        most = min(top_k, int(num_visible[-1]))
        return Chosen(*self._library.select(query, weights, keys, table, torch.from_numpy(num_visible), most))

    def attend_selected(
        self, query: Tensor, keys: Tensor, table: Tensor, selected: Tensor, scale: float, out: Partial
    ) -> None:
        """Let each query's keys be pages of one key, whose numbers are offsets in elements."""
        page_stride, _, slot_stride, dim_stride = keys.stride()
        in_page = torch.arange(keys.shape[2]) * slot_stride
        offsets = (table[:, None] * page_stride + in_page).flatten()
        key = keys.as_strided((1, 1, 1, keys.shape[3]), (1, 1, 1, dim_stride))
        value = key[..., : out.out.shape[-1]]
        step = max(MOST_SELECTED // selected.shape[1], 1)

        def attend_from(first: int) -> None:
            # Tensors of one round are freed before those of the next are made.
            numbers, num_keys = counted(selected[first : first + step])
            entries = offsets.index_select(0, numbers.clamp(min=0).flatten())
            rows = torch.arange(len(numbers))
            items = torch.zeros(len(numbers), NUM_ITEM_FIELDS, dtype=torch.int64)
            items[:, 0], items[:, 1], items[:, 2] = first + rows, 1, rows * numbers.shape[1]
            items[:, 4], items[:, 5], items[:, 6] = num_keys, num_keys - 1, 1
            self._library.attend(items[num_keys > 0], entries, 1, query, key, value, *out, scale=scale)

        for first in range(0, len(query), step):
            attend_from(first)


class _NativeStep:
    def __init__(
        self, library: Library, pieces: Sequence[Piece], items: Tensor, tables: Tensor, page_size: int
    ) -> None:
        self._library, self._items, self._tables, self._page_size = library, items, tables, page_size
        self._num_queries = max((piece.query.stop for piece in pieces), default=0)
        self._num_pages = int(tables.max()) + 1 if len(tables) else 0
        self._num_covered = sum(piece.num_queries for piece in pieces)

    def attend(self, query: Tensor, key_pages: Tensor, value_pages: Tensor, params: AttentionParams) -> Partial:
        _check(query, key_pages, value_pages, params, self._num_queries)
        assert self._num_pages <= len(key_pages), f"page {self._num_pages - 1} is not in {len(key_pages)} pages"
        assert self._page_size == key_pages.shape[2], f"page sizes {self._page_size} and {key_pages.shape[2]} differ"
        covers_all = self._num_covered == len(query)
        result = (unwritten_partial if covers_all else empty_partial)(query, value_pages.shape[-1])
        tables, page_size, kv = self._tables, self._page_size, (key_pages, value_pages)
        self._library.attend(
            self._items, tables, page_size, query, *kv, *result, scale=params.scale, overwrites=covers_all
        )
        return result


class _NativeRows:
    """Queries over rows, which are treated as one page. Pieces may overlap in queries, so they run one at a time."""

    def __init__(self, library: Library, pieces: Sequence[Piece]) -> None:
        self._library = library
        self._items = list(_items(pieces, [0] * len(pieces))[:, None])
        self._num_queries = max((piece.query.stop for piece in pieces), default=0)
        self._num_keys = max((piece.key.stop for piece in pieces), default=0)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Partial:
        _check(query, key, value, params, self._num_queries)
        assert self._num_keys <= len(key), f"got {len(key)} keys, but the runs have {self._num_keys}"
        result = empty_partial(query, value.shape[-1])
        key, value = (x.transpose(0, 1)[None] for x in (key, value))
        for item in self._items:
            self._library.attend(item, _FIRST_PAGE, _ONE_PAGE, query, key, value, *result, scale=params.scale)
        return result


class _NativeGraph:
    """Attention of one token per request, with items and page tables at fixed addresses. It selects no keys."""

    def __init__(self, library: Library, shape: GraphShape) -> None:
        self._library, self._page_size = library, shape.page_size
        self._tables = torch.zeros(shape.num_requests, shape.most_pages, dtype=torch.int64)
        self._items = torch.zeros(shape.num_requests, NUM_ITEM_FIELDS, dtype=torch.int64)
        requests = torch.arange(shape.num_requests)
        self._items[:, 0], self._items[:, 1], self._items[:, 2] = requests, 1, requests * shape.most_pages
        self._items[:, 6] = 1
        self._item_rows, self._table_rows = self._items.numpy(), self._tables.numpy()

    def fill(self, num_keys: Sequence[int], tables: Sequence[NDArray[np.int64]]) -> None:
        self._item_rows[:, 4:6] = [(num, num - 1) for num in num_keys]
        for row, table in zip(self._table_rows, tables, strict=True):
            row[: len(table)] = table

    def best_keys(self, *_: object, **__: object) -> Tensor:
        raise AssertionError("a model that selects keys has latents")

    def attend_selected(self, *_: object, **__: object) -> Partial:
        raise AssertionError("a model that selects keys has latents")

    def attend(self, query: Tensor, key_pages: Tensor, value_pages: Tensor, params: AttentionParams) -> Partial:
        result, kv = unwritten_partial(query, value_pages.shape[-1]), (key_pages, value_pages)
        tables, page_size = self._tables, self._page_size
        self._library.attend(self._items, tables, page_size, query, *kv, *result, scale=params.scale, overwrites=True)
        return result


def _items(pieces: Sequence[Piece], first_entries: Sequence[int]) -> Tensor:
    """Return one Item of attention.h, a row, per piece. ``first_entries`` index the pieces' first page numbers."""
    rows = (
        (piece.query.start, piece.num_queries, first_entry, piece.key.start, piece.num_keys, piece.ahead, piece.step)
        for piece, first_entry in zip(pieces, first_entries, strict=True)
    )
    fields = np.fromiter(chain.from_iterable(rows), np.int64, len(pieces) * NUM_ITEM_FIELDS)
    return torch.from_numpy(fields).view(-1, NUM_ITEM_FIELDS)


def _check(query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, num_queries: int) -> None:
    assert num_queries <= len(query), f"got {len(query)} queries, but the runs have {num_queries}"
    assert key.shape[:-1] == value.shape[:-1], f"keys have shape {key.shape}, values {value.shape}"
    assert params.window is None, f"a window of {params.window} tokens is not supported"
