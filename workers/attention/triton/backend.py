"""Attention on a GPU with the Triton kernels of workers.kernels, which read keys and values in place."""

from collections.abc import Sequence
from functools import cache, partial
from itertools import accumulate

import torch
from torch import Tensor

from workers.attention.interface import AttentionParams, GraphShape, RowAttention, StepAttention
from workers.attention.merge import Partial, empty_partial, unwritten_partial
from workers.attention.runs import Run, paged_pieces, row_pieces
from workers.attention.torch_backend import TorchAttention
from workers.attention.triton.decode import DecodeAttention
from workers.attention.triton.selection import TritonSelection
from workers.attention.triton.tiling import Item, Segment, make_tiles, split
from workers.device import device_of
from workers.kernels.attention import MOST_BLOCK_KEYS, attend, blocks_for
from workers.kernels.partials import unwritten_parts

_FEW_ROWS = 16
"""Maximum number of rows in memory-bound tiles, as in decode. Compute-bound tiles are launched separately."""


class TritonAttention(TritonSelection):
    """Attention that copies no keys. Stateless. Strides are arbitrary, but the elements of a head must be adjacent."""

    def prepare(
        self, runs: Sequence[Run], page_tables: Sequence[Tensor], page_size: int, key_lens: Sequence[int] | None = None
    ) -> StepAttention:
        return _PagedStep(runs, page_tables, page_size, key_lens)

    def prepare_rows(self, query_runs: Sequence[Run], key_runs: Sequence[Run]) -> RowAttention:
        return _Rows(query_runs, key_runs)

    def prepare_graph(self, shape: GraphShape) -> DecodeAttention:
        return DecodeAttention(shape)


def paged_items(
    runs: Sequence[Run],
    table_lens: Sequence[int],
    page_size: int,
    key_lens: Sequence[int] | None,
    window: int | None = None,
) -> list[Item]:
    """Return the work items of ``prepare``. A segment's table is an offset into the concatenated page tables."""
    tables = list(accumulate(table_lens, initial=0))
    segments: dict[int, Segment] = {}
    for piece in paged_pieces(runs, key_lens, window):
        keys = piece.key
        assert keys.stop <= table_lens[piece.request] * page_size, f"{piece} ends past its pages"
        begin = keys.start // MOST_BLOCK_KEYS * MOST_BLOCK_KEYS
        ahead = piece.ahead + keys.start
        segments[piece.query.start] = Segment(tables[piece.request], 0, begin, keys.stop, ahead, piece.step)
    first_rows = accumulate((run.count for run in runs), initial=0)
    return [
        Item(first_row, run.count, (segments[first_row],) if run.count and first_row in segments else ())
        for run, first_row in zip(runs, first_rows, strict=False)
    ]


def row_items(query_runs: Sequence[Run], key_runs: Sequence[Run], window: int | None) -> list[Item]:
    """Return the work items of ``prepare_rows``."""
    segments: dict[int, list[Segment]] = {}
    first_rows = list(accumulate((run.count for run in query_runs), initial=0))
    run_of_row = [index for index, run in enumerate(query_runs) for _ in range(run.count)]
    for piece in row_pieces(query_runs, key_runs, window):
        run = run_of_row[piece.query.start]
        # Relative to the run's first query, even if that query sees none of these keys.
        ahead = piece.ahead - (piece.query.start - first_rows[run]) * piece.step
        segment = Segment(0, piece.key.start, 0, piece.num_keys, ahead, piece.step)
        segments.setdefault(run, []).append(segment)
    return [
        Item(first_row, run.count, tuple(segments.get(index, ())))
        for index, (run, first_row) in enumerate(zip(query_runs, first_rows, strict=False))
    ]


class _Work:
    """Work items over keys ``[page, H, slot, ...]``. The first call divides the items into launches."""

    def __init__(self, items: Sequence[Item], tables: Tensor | None, page_size: int, window: int | None) -> None:
        """``tables`` is None if keys are in rows."""
        self._items = [item for item in items if item.num_queries]
        self._num_rows = max((item.first_row + item.num_queries for item in items), default=0)
        self._tables, self._page_size, self._window = tables, page_size, window
        self._launches: list[tuple[partial[None], Tensor | None]] = []
        """Launches, each with counters if its tiles cover only some of the keys of their queries."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Partial:
        assert self._num_rows <= len(query), f"got {len(query)} queries, but the runs have {self._num_rows}"
        assert key.shape[:-1] == value.shape[:-1], f"keys have shape {key.shape}, values {value.shape}"
        if not self._items:
            return empty_partial(query, value.shape[-1])
        assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1, "the elements of a head are not adjacent"
        make = empty_partial if self._num_rows < len(query) else unwritten_partial
        result = make(query, value.shape[-1])
        if not self._launches:
            groups = query.shape[1] // key.shape[1]
            few = [item for item in self._items if item.num_queries * groups <= _FEW_ROWS]
            many = [item for item in self._items if item.num_queries * groups > _FEW_ROWS]
            self._launches = [self._prepare_launch(items, query, key, value) for items in (few, many) if items]
        for launch, arrived in self._launches:
            parts = None if arrived is None else unwritten_parts(query, value.shape[-1], arrived)
            launch(query, key, value, *result, scale=scale, parts=parts)
        return result

    def _prepare_launch(
        self, items: Sequence[Item], query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[partial[None], Tensor | None]:
        blocks = blocks_for(
            max(item.num_queries for item in items),
            query.shape[1] // key.shape[1],
            head_dim=query.shape[2],
            value_dim=value.shape[-1],
            itemsize=query.itemsize,
            page_size=self._page_size,
        )
        num_shares = query.shape[1] // blocks.heads
        parts = split(items, blocks.queries, blocks.programs_for(num_shares), blocks.keys)
        tiling = make_tiles(parts or items, blocks.queries, in_parts=parts is not None)
        launch = partial(
            attend,
            tiles=device_of(key).put(torch.from_numpy(tiling.tiles)),
            segments=device_of(key).put(torch.from_numpy(tiling.segments)),
            # Made on the GPU, since a copy from the host would wait for it.
            tables=key.new_zeros(1, dtype=torch.int64) if self._tables is None else self._tables,
            page_size=self._page_size,
            blocks=blocks,
            window=self._window,
        )
        return launch, key.new_zeros(tiling.num_slots, num_shares, dtype=torch.int32) if tiling.num_slots else None


class _PagedStep:
    def __init__(
        self, runs: Sequence[Run], page_tables: Sequence[Tensor], page_size: int, key_lens: Sequence[int] | None
    ) -> None:
        table_lens = [len(table) for table in page_tables]
        tables = torch.cat(list(page_tables)) if page_tables else torch.zeros(0, dtype=torch.int64)

        @cache
        def work(window: int | None) -> _Work:
            return _Work(paged_items(runs, table_lens, page_size, key_lens, window), tables, page_size, window)

        self._work, self._page_size = work, page_size

    def attend(self, query: Tensor, key_pages: Tensor, value_pages: Tensor, params: AttentionParams) -> Partial:
        assert self._page_size == key_pages.shape[2], f"wrong page size {key_pages.shape[2]}"
        return self._work(params.window).attend(query, key_pages, value_pages, params.scale)


class _Rows:
    """Queries over rows, which are treated as one page."""

    def __init__(self, query_runs: Sequence[Run], key_runs: Sequence[Run]) -> None:
        self._is_strided = any(run.step > 1 for run in (*query_runs, *key_runs))
        self._in_torch = TorchAttention().prepare_rows(query_runs, key_runs)

        @cache
        def work(window: int | None) -> _Work:
            return _Work(row_items(query_runs, key_runs, window), None, 0, window)

        self._work = work

    def attend(self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Partial:
        if params.window is not None and self._is_strided:
            # The kernel counts a window in rows, but adjacent rows do not hold adjacent tokens here.
            return self._in_torch.attend(query, key, value, params)
        key, value = (x.transpose(0, 1)[None] for x in (key, value))
        return self._work(params.window).attend(query, key, value, params.scale)
