"""Which rows of some queries see which rows of some keys, read off their runs alone. No torch, no I/O."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from workers.context_parallel.runs import Run


class Piece(NamedTuple):
    """Rows of queries and rows of keys that they see a part of; neither slice is empty."""

    query: slice
    key: slice
    ahead: int | None
    """Query i of the slice sees keys 0..ahead + i of the slice, as far as there are; all of them if None."""


def visible_pieces(query_runs: Sequence[Run], key_runs: Sequence[Run]) -> list[Piece]:
    """Every pair of a query and a key of one request, the key not at a later position, in exactly one piece.

    Rows lie in the order of the runs. Runs that overlap have one step, unless one of them is a single token. What a
    run of queries sees in adjacent rows is one piece.
    """
    placed_keys: defaultdict[int, list[tuple[Run, int]]] = defaultdict(list)
    for key, key_row in zip(key_runs, accumulate((run.count for run in key_runs), initial=0), strict=False):
        if key.count:
            placed_keys[key.request].append((key, key_row))
    pieces: list[Piece] = []
    query_row = 0
    for query in query_runs:
        for key, key_row in placed_keys[query.request]:
            piece = _of_pair(query, query_row, key, key_row)
            if piece is not None and pieces and _continues(piece, pieces[-1]):
                piece = _joined(pieces.pop(), piece)
            if piece is not None:
                pieces.append(piece)
        query_row += query.count
    return pieces


def _of_pair(query: Run, query_row: int, key: Run, key_row: int) -> Piece | None:
    queries = slice(query_row, query_row + query.count)
    if key.last_position <= query.first_position:
        return Piece(queries, slice(key_row, key_row + key.count), None)
    step = key.step if query.count == 1 else query.step
    assert key.count == 1 or key.step == step, f"{query} overlaps {key}, whose step is another"
    # Query j of the run sees the keys 0..j + ahead.
    ahead = (query.first_position - key.first_position) // step
    first_query = max(-ahead, 0)
    num_keys = min(key.count, query.count + ahead)
    if num_keys <= 0:
        return None
    return Piece(slice(query_row + first_query, queries.stop), slice(key_row, key_row + num_keys), max(ahead, 0))


def _continues(piece: Piece, last: Piece) -> bool:
    return last.ahead is None and last.query == piece.query and last.key.stop == piece.key.start


def _joined(last: Piece, piece: Piece) -> Piece:
    ahead = None if piece.ahead is None else last.key.stop - last.key.start + piece.ahead
    return Piece(piece.query, slice(last.key.start, piece.key.stop), ahead)
