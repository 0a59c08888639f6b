"""Which rows of some queries see which rows of some keys, read off their runs alone. No torch, no I/O."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from workers.context_parallel.runs import Run


class Piece(NamedTuple):
    """One rectangle or triangle of attention between rows of queries and rows of keys; neither slice is empty."""

    query: slice
    key: slice
    causal: bool
    """Query i of the slice sees keys 0..i of the slice, as far as there are; without it every query sees all."""


def visible_pieces(query_runs: Sequence[Run], key_runs: Sequence[Run]) -> list[Piece]:
    """Every pair of a query and a key of one request, the key not at a later position, in exactly one piece.

    Rows lie in the order of the runs. Runs that overlap have one step, unless one of them is a single token.
    """
    placed_keys = list(zip(key_runs, accumulate((run.count for run in key_runs), initial=0), strict=False))
    pieces: list[Piece] = []
    query_row = 0
    for query in query_runs:
        for key, key_row in placed_keys:
            if key.request == query.request and key.count:
                pieces += _of_pair(query, query_row, key, key_row)
        query_row += query.count
    return pieces


def _of_pair(query: Run, query_row: int, key: Run, key_row: int) -> Iterator[Piece]:
    queries, keys = slice(query_row, query_row + query.count), slice(key_row, key_row + key.count)
    if key.last_position <= query.first_position:
        yield Piece(queries, keys, causal=False)
        return
    step = key.step if query.count == 1 else query.step
    assert key.count == 1 or key.step == step, f"{query} overlaps {key}, whose step is another"
    # Query j sees the keys 0..j + ahead.
    ahead = (query.first_position - key.first_position) // step
    if ahead > 0:
        yield Piece(queries, slice(key_row, key_row + ahead), causal=False)
    first_query, first_key = max(-ahead, 0), max(ahead, 0)
    num_keys = min(key.count - first_key, query.count - first_query)
    if num_keys > 0:
        begin = key_row + first_key
        yield Piece(slice(query_row + first_query, queries.stop), slice(begin, begin + num_keys), causal=True)
