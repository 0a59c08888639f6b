"""Attention on a CPU in bf16, by the library of attention.cpp, reading keys and values in place."""

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from workers.attention.interface import AttentionParams, GraphShape, RowAttention, StepAttention
from workers.attention.merge import Partial, empty_partial
from workers.attention.runs import Piece, Run, paged_pieces, row_pieces
from workers.native.compile import CannotCompileError, Compiler, compiled_library, find_compiler
from workers.native.library import Library

_ONE_PAGE = 1 << 62
"""Page size for keys stored in rows."""
_FIRST_PAGE = torch.zeros(1, dtype=torch.int64)


class _Item(NamedTuple):
    """Fields of Item in attention.cpp. Query i sees keys 0..ahead + i * step, as far as they exist."""

    first_query: int
    num_queries: int
    table: int
    """Start of this item's page numbers in the table of all items."""
    first_key: int
    num_keys: int
    ahead: int
    step: int

    @classmethod
    def of(cls, piece: Piece, table: int) -> "_Item":
        return cls(
            piece.query.start, piece.num_queries, table, piece.key.start, piece.num_keys, piece.ahead, piece.step
        )


class NativeAttention:
    """Attention without key copies or merges within a run; stateless, with as many threads as torch has."""

    def __init__(self, compiler: Compiler | None = None) -> None:
        """Compile the library if this machine has none yet; CannotCompileError gives the reason if that fails."""
        path = compiled_library(compiler or find_compiler())
        try:
            self._library = Library(path, torch.get_num_threads())
        except OSError as error:
            raise CannotCompileError(f"cannot load {error}") from error

    def prepare(
        self,
        runs: Sequence[Run],
        page_tables: Sequence[Tensor],
        page_size: int,
        key_lens: Sequence[int] | None = None,
    ) -> StepAttention:
        lens = [len(table) for table in page_tables]
        pieces, tables = paged_pieces(runs, key_lens), list(accumulate(lens, initial=0))
        for piece in pieces:
            assert piece.key.stop <= lens[piece.request] * page_size, f"{piece} ends past its pages"
        items = [_Item.of(piece, tables[piece.request]) for piece in pieces]
        return _NativeStep(self._library, items, torch.cat([_FIRST_PAGE[:0], *page_tables]), page_size)

    def prepare_rows(self, query_runs: Sequence[Run], key_runs: Sequence[Run]) -> RowAttention:
        return _NativeRows(self._library, [_Item.of(piece, 0) for piece in row_pieces(query_runs, key_runs)])

    def prepare_graph(self, shape: GraphShape) -> None:
        """Return None: a CPU has no graphs."""


class _NativeStep:
    def __init__(self, library: Library, items: Sequence[_Item], tables: Tensor, page_size: int) -> None:
        self._library = library
        self._items = _as_tensor(items)
        self._tables = tables
        self._page_size = page_size
        self._num_queries = max((item.first_query + item.num_queries for item in items), default=0)
        self._num_pages = int(tables.max()) + 1 if len(tables) else 0

    def attend(self, query: Tensor, key_pages: Tensor, value_pages: Tensor, params: AttentionParams) -> Partial:
        assert self._num_queries <= len(query), f"{len(query)} queries, {self._num_queries} in the runs"
        _check(key_pages, value_pages, params)
        assert self._num_pages <= len(key_pages), f"page {self._num_pages - 1} of {len(key_pages)}"
        assert self._page_size == key_pages.shape[2], f"pages of {self._page_size} and of {key_pages.shape[2]} tokens"
        result = empty_partial(query)
        self._library.attend(
            self._items, self._tables, self._page_size, query, key_pages, value_pages, *result, scale=params.scale
        )
        return result


class _NativeRows:
    """Queries over rows, treated as one page. Pieces may share queries, so they run one by one."""

    def __init__(self, library: Library, items: Sequence[_Item]) -> None:
        self._library = library
        self._items = [_as_tensor([item]) for item in items]
        self._num_queries = max((item.first_query + item.num_queries for item in items), default=0)
        self._num_keys = max((item.first_key + item.num_keys for item in items), default=0)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Partial:
        assert self._num_queries <= len(query), f"{len(query)} queries, {self._num_queries} in the runs"
        _check(key, value, params)
        assert self._num_keys <= len(key), f"{len(key)} keys, {self._num_keys} in the runs"
        result = empty_partial(query)
        key, value = (x.transpose(0, 1)[None] for x in (key, value))
        for item in self._items:
            self._library.attend(item, _FIRST_PAGE, _ONE_PAGE, query, key, value, *result, scale=params.scale)
        return result


def _as_tensor(items: Sequence[_Item]) -> Tensor:
    num_fields = len(_Item._fields)
    fields = np.fromiter(chain.from_iterable(items), np.int64, len(items) * num_fields)
    return torch.from_numpy(fields).view(-1, num_fields)


def _check(key: Tensor, value: Tensor, params: AttentionParams) -> None:
    assert key.shape == value.shape, f"keys {key.shape}, values {value.shape}"
    assert params.window is None, f"a window of {params.window} tokens"
