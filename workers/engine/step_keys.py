"""Keys of a step, in rows or in pages, to which a rank's queries attend as stored or as a layer expands them.

Expanded keys are larger than stored ones, so only one tile of them exists at a time.
"""

from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import NamedTuple

from torch import Tensor

from cluster.spec.kv import pages_for
from workers.attention.interface import AttentionBackend, AttentionParams, RowAttention
from workers.attention.merge import Partial
from workers.attention.runs import Run, sees_any
from workers.engine.step_pages import StepPages
from workers.layers.attention import Expand
from workers.layers.attention_config import MOST_EXPANDED
from workers.memory.page_pool import PagePool


class RowKeys:
    """Keys in rows, in the order of ``key_runs``."""

    def __init__(self, backend: AttentionBackend, query_runs: Sequence[Run], key_runs: Sequence[Run]) -> None:
        self._stored = cache(partial(backend.prepare_rows, query_runs, key_runs))
        self._tiles = cache(partial(_row_tiles, backend, query_runs, key_runs))

    def attend(
        self, q: Tensor, parts: Sequence[Tensor], params: AttentionParams, expand: Expand | None
    ) -> Iterator[Partial]:
        """Yield attention over rows whose stored parts are ``parts [rows, kv_heads, dim]``. See AttentionContext."""
        if expand is None:
            yield self._stored().attend(q, *params.key_and_value(parts), params)
            return
        for rows, attention in self._tiles():
            yield attention.attend(q, *expand(*(part[rows] for part in parts)), params)


class PrefixKeys:
    """Cached keys in pages, of which the queries of a request see the first ``lens[request]``."""

    def __init__(
        self,
        backend: AttentionBackend,
        query_runs: Sequence[Run],
        pages: StepPages,
        page_size: int,
        lens: Sequence[int],
    ) -> None:
        self._stored = cache(partial(backend.prepare, query_runs, pages.tables, page_size, lens))
        self._tiles = cache(partial(_page_tiles, backend, query_runs, pages, page_size, lens))

    def attend(
        self, q: Tensor, layer: int, pool: PagePool, params: AttentionParams, expand: Expand | None
    ) -> Iterator[Partial]:
        """Yield attention over a layer's cached keys. See AttentionContext."""
        if expand is None:
            yield self._stored().attend(q, *params.key_and_value(pool.layer_view(layer)), params)
            return
        for tile in self._tiles():
            yield tile.attention.attend(q, *expand(*pool.split(layer, read_prefixes(pool, layer, tile.pages))), params)


class _PageTile(NamedTuple):
    pages: Sequence[tuple[Tensor, int]]
    """Pages of each request in the tile, and the number of its tokens in them."""
    attention: RowAttention


def read_prefixes(pool: PagePool, layer: int, pages: Sequence[tuple[Tensor, int]], out: Tensor | None = None) -> Tensor:
    """Read the first tokens in the pages of each request into rows ``[rows, heads, width]``, request by request.

    Pages are read in full, which is faster: ``out`` needs room for another page after the rows.
    """
    num_rows = sum(length for _, length in pages)
    if out is None:
        out = pool.layer_view(layer)[0].new_empty(num_rows + pool.page_size, *pool.row_shape(layer))
    begin = 0
    for some, length in pages:
        # Rows of the next request overwrite the surplus.
        pool.read_pages(layer, some, out[begin : begin + len(some) * pool.page_size])
        begin += length
    return out[:num_rows]


def _row_tiles(
    backend: AttentionBackend, query_runs: Sequence[Run], key_runs: Sequence[Run]
) -> list[tuple[slice, RowAttention]]:
    """Return tiles of rows, each with its attention. Omit tiles that no query sees."""
    tiles = [(rows, runs) for rows, runs in _cut(key_runs) if sees_any(query_runs, runs)]
    return [(rows, backend.prepare_rows(query_runs, runs)) for rows, runs in tiles]


def _page_tiles(
    backend: AttentionBackend, query_runs: Sequence[Run], pages: StepPages, page_size: int, lens: Sequence[int]
) -> list[_PageTile]:
    prefixes = [Run(request, 0, length, 1) for request, length in enumerate(lens)]
    tiles = []
    for _, runs in _cut(prefixes, page_size):
        if sees_any(query_runs, runs):
            tables = [pages.tables[run.request][run.first_position // page_size :] for run in runs]
            held = [
                (table[: pages_for(run.count, page_size)], run.count) for table, run in zip(tables, runs, strict=True)
            ]
            tiles.append(_PageTile(held, backend.prepare_rows(query_runs, runs)))
    return tiles


def _cut(runs: Sequence[Run], multiple: int = 1) -> Iterator[tuple[slice, list[Run]]]:
    """Divide runs, whose rows are adjacent, into tiles. Runs are cut only after a multiple of ``multiple`` rows.

    A tile has at most ``MOST_EXPANDED`` rows, or ``multiple`` if that is more.
    """
    most_rows = max(MOST_EXPANDED // multiple, 1) * multiple
    begin, tile, num_rows = 0, list[Run](), 0
    for run in runs:
        done = 0
        while done < run.count:
            if (room := (most_rows - num_rows) // multiple * multiple) == 0:
                yield slice(begin, begin + num_rows), tile
                begin, tile, num_rows = begin + num_rows, [], 0
                continue
            count = min(room, run.count - done)
            tile.append(Run(run.request, run.first_position + done * run.step, count, run.step if count > 1 else 1))
            done, num_rows = done + count, num_rows + count
    if tile:
        yield slice(begin, begin + num_rows), tile
