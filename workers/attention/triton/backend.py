"""Attention on a GPU, by the kernels of workers.kernels, straight from where keys and values lie."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from cluster.spec.kv import pages_for
from workers.attention.interface import RowAttention
from workers.attention.pieces import visible_pieces
from workers.attention.triton.tiling import Item, Segment, Tiling, cut, split
from workers.context_parallel.merge import Partial, empty_partial
from workers.context_parallel.runs import Run
from workers.device import on_device
from workers.kernels.attention import Blocks, attend, blocks_for
from workers.kernels.parts import Parts

_FEW_ROWS = 16
"""Tiles of at most so many rows, as in decode, are launched apart: they want memory, the others arithmetic."""


class TritonAttention:
    """Copies no keys; stateless. Queries of any strides, as long as the elements of a head are adjacent."""

    def prepare(
        self,
        runs: Sequence[Run],
        page_tables: Sequence[Tensor],
        page_size: int,
        key_lens: Sequence[int] | None = None,
    ) -> "PagedStep":
        """See AttentionBackend."""
        items = paged_items(runs, [len(table) for table in page_tables], page_size, key_lens)
        tables = torch.cat(list(page_tables)) if page_tables else torch.zeros(0, dtype=torch.int64)
        return PagedStep(_Work(items, tables, page_size))

    def prepare_rows(self, query_runs: Sequence[Run], key_runs: Sequence[Run]) -> RowAttention:
        """See AttentionBackend."""
        return _Rows(_Work(row_items(query_runs, key_runs), None, 0))


def paged_items(
    runs: Sequence[Run], table_lens: Sequence[int], page_size: int, key_lens: Sequence[int] | None
) -> list[Item]:
    """What ``prepare`` was told, over the page tables one after another."""
    tables = list(accumulate(table_lens, initial=0))
    items = []
    for run, first_row in zip(runs, accumulate((run.count for run in runs), initial=0), strict=False):
        num_keys = run.last_position + 1 if key_lens is None else key_lens[run.request]
        ahead, step = (run.first_position, run.step) if key_lens is None else (num_keys - 1, 0)
        assert pages_for(num_keys, page_size) <= table_lens[run.request], f"{run} ends past its pages"
        segment = Segment(tables[run.request], 0, 0, num_keys, ahead, step)
        items.append(Item(first_row, run.count, (segment,) if num_keys else ()))
    return items


def row_items(query_runs: Sequence[Run], key_runs: Sequence[Run]) -> list[Item]:
    """What ``prepare_rows`` was told."""
    segments: dict[int, list[Segment]] = {}
    first_rows = list(accumulate((run.count for run in query_runs), initial=0))
    run_of_row = [index for index, run in enumerate(query_runs) for _ in range(run.count)]
    for query, key, ahead in visible_pieces(query_runs, key_runs):
        run = run_of_row[query.start]
        num_keys = key.stop - key.start
        # Relative to the first query of the run, which may see nothing of it.
        seen = (num_keys - 1, 0) if ahead is None else (ahead - (query.start - first_rows[run]), 1)
        segments.setdefault(run, []).append(Segment(0, key.start, 0, num_keys, *seen))
    return [
        Item(first_row, run.count, tuple(segments.get(index, ())))
        for index, (run, first_row) in enumerate(zip(query_runs, first_rows, strict=False))
    ]


class _Work:
    """Items, and the launches that they are cut into when the first layer tells how many heads there are."""

    def __init__(self, items: Sequence[Item], tables: Tensor | None, page_size: int) -> None:
        self._items = [item for item in items if item.num_queries]
        self._num_rows = max((item.first_row + item.num_queries for item in items), default=0)
        self._tables = tables
        self.page_size = page_size
        self.launches: list[_Launch] | None = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Partial:
        """Queries ``[T, heads, D]`` over ``[page, H, slot, D]``."""
        assert self._num_rows <= len(query), f"{len(query)} queries, {self._num_rows} in the runs"
        assert key.shape == value.shape, f"keys {key.shape}, values {value.shape}"
        if not self._items:
            return empty_partial(query)
        assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1, "elements of a head are not adjacent"
        result = empty_partial(query) if self._num_rows < len(query) else unwritten(query)
        if self.launches is None:
            self.launches = self._cut(query, key)
        for launch in self.launches:
            launch.run(query, key, value, result)
        return result

    def _cut(self, query: Tensor, key: Tensor) -> "list[_Launch]":
        groups = query.shape[1] // key.shape[1]
        few = [item for item in self._items if item.num_queries * groups <= _FEW_ROWS]
        many = [item for item in self._items if item.num_queries * groups > _FEW_ROWS]
        launches = []
        for items in (few, many):
            if items:
                most_rows = max(item.num_queries for item in items) * groups
                blocks = blocks_for(most_rows, query.shape[2], query.itemsize, self.page_size)
                queries = blocks.rows // groups
                parts = split(items, queries, key.shape[1], blocks.keys)
                tiling = cut(items, queries) if parts is None else cut(parts, queries, in_parts=True)
                launches.append(_Launch(tiling, blocks, self._tables, self.page_size, key))
        return launches


class _Launch:
    """One launch of the kernel."""

    def __init__(self, tiling: Tiling, blocks: Blocks, tables: Tensor | None, page_size: int, key: Tensor) -> None:
        """``key [page, H, slot, D]`` is like those to come."""
        device = key.device
        self._tiles, self._segments = (
            on_device(torch.from_numpy(array), device) for array in (tiling.tiles, tiling.segments)
        )
        self._tables = torch.zeros(1, dtype=torch.int64, device=device) if tables is None else tables.to(device)
        self._blocks, self._page_size = blocks, page_size
        self.arrived = key.new_zeros(tiling.num_slots, key.shape[1], dtype=torch.int32) if tiling.num_slots else None

    def run(self, query: Tensor, key: Tensor, value: Tensor, result: Partial) -> None:
        """Fill the rows of ``result`` that it has queries of."""
        attend(
            query,
            key,
            value,
            *result,
            tiles=self._tiles,
            segments=self._segments,
            tables=self._tables,
            page_size=self._page_size,
            blocks=self._blocks,
            parts=None if self.arrived is None else unwritten_parts(query, self.arrived),
        )


class PagedStep:
    """Queries over pages."""

    def __init__(self, work: _Work) -> None:
        self._work = work

    def attend(self, query: Tensor, key_pages: Tensor, value_pages: Tensor) -> Partial:
        """See StepAttention."""
        assert self._work.page_size == key_pages.shape[2], f"pages of {key_pages.shape[2]} tokens"
        return self._work.attend(query, key_pages, value_pages)

    @property
    def arrived(self) -> list[Tensor]:
        """See Parts; of each launch that has any, as they are after the first ``attend``."""
        return [launch.arrived for launch in self._work.launches or () if launch.arrived is not None]


class _Rows:
    """Queries over rows, which are one page."""

    def __init__(self, work: _Work) -> None:
        self._work = work

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Partial:
        """See RowAttention."""
        return self._work.attend(query, *(x.transpose(0, 1)[None] for x in (key, value)))


def unwritten_parts(query: Tensor, arrived: Tensor) -> Parts:
    """Room for parts of a result like ``query [T, heads, D]``."""
    shape = (len(arrived), *query.shape[1:])
    found, lse = query.new_empty(shape, dtype=torch.float32), query.new_empty(shape[:-1], dtype=torch.float32)
    return Parts(found, lse, arrived)


def unwritten(query: Tensor) -> Partial:
    """Room for a result like ``query [T, heads, D]``."""
    return Partial(query.new_empty(query.shape), query.new_empty(query.shape[:-1], dtype=torch.float32))
