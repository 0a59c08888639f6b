"""Runs of tokens, which determine causality, and pieces of attention work derived from them. No torch, no I/O."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from cluster.spec.kv import pages_for


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens of one request at positions first, first + step, .... Positions count from the start of the request."""

    request: int
    first_position: int
    count: int
    step: int

    @property
    def last_position(self) -> int:
        return self.first_position + (self.count - 1) * self.step

    @property
    def num_pairs(self) -> int:
        """Return the number of (query, key) pairs, in which the query at position p sees the keys at 0..p."""
        return self.count * (self.first_position + 1) + self.step * (self.count * (self.count - 1) // 2)

    def pairs_beyond(self, most_keys: int) -> int:
        """Return the number of pairs that fall away if a query uses at most ``most_keys`` of the keys that it sees."""
        num_full = max(0, -((self.first_position - most_keys) // self.step))
        count, first_beyond = max(0, self.count - num_full), self.first_position + num_full * self.step - most_keys + 1
        return count * first_beyond + self.step * (count * (count - 1) // 2)


RankRuns = tuple[Run, ...]


def coalesce(runs: Iterable[Run]) -> RankRuns:
    """Drop empty runs, set the step of single tokens to 1, and join each run with the run that continues it."""
    joined: list[Run] = []
    for run in (Run(run.request, run.first_position, run.count, run.step if run.count > 1 else 1) for run in runs):
        if joined and _continues(run, joined[-1]):
            run = Run(run.request, joined[-1].first_position, joined.pop().count + run.count, 1)
        if run.count > 0:
            joined.append(run)
    return tuple(joined)


def sees_any(query_runs: Iterable[Run], key_runs: Iterable[Run]) -> bool:
    """Return whether any query is at the position of a key of the same request, or at a later one."""
    latest: dict[int, int] = {}
    for run in query_runs:
        latest[run.request] = max(run.last_position, latest.get(run.request, -1))
    return any(run.count > 0 and run.first_position <= latest.get(run.request, -1) for run in key_runs)


def _continues(run: Run, last: Run) -> bool:
    adjacent = run.request == last.request and run.first_position == last.last_position + 1
    return adjacent and run.step == last.step == 1


class Piece(NamedTuple):
    """Non-empty ranges of adjacent query rows and of keys. Each query sees some or all of the keys.

    Query i of the piece sees keys ``behind + i * step`` to ``ahead + i * step`` of the range, as far as they exist.
    """

    request: int
    query: slice
    key: slice
    ahead: int
    step: int
    behind: int | None = None
    """First key that query 0 sees. None if every query sees the keys from the start of the range on."""

    @property
    def num_queries(self) -> int:
        return int(self.query.stop) - int(self.query.start)

    @property
    def num_keys(self) -> int:
        return int(self.key.stop) - int(self.key.start)

    @property
    def is_full(self) -> bool:
        """Return whether every query sees every key."""
        return self.behind is None and self.ahead >= self.num_keys - 1


def paged_pieces(runs: Sequence[Run], key_lens: Sequence[int] | None, window: int | None = None) -> list[Piece]:
    """Return one piece for each run that sees any key. Keys are numbered by their index in a request's pages.

    The arguments are those of ``AttentionBackend.prepare``.
    """
    pieces = []
    for run, query in zip(runs, _rows_of(runs), strict=True):
        num_keys = run.last_position + 1 if key_lens is None else key_lens[run.request]
        if not run.count or not num_keys:
            continue
        if window is None and key_lens is not None:
            pieces.append(Piece(run.request, query, slice(0, num_keys), num_keys - 1, 0))
            continue
        assert run.first_position >= num_keys - 1 or key_lens is None, f"{run} does not follow its {num_keys} keys"
        piece = Piece(run.request, query, slice(0, num_keys), run.first_position, run.step)
        pieces += [piece] if window is None else _from(piece, run.first_position - window + 1)
    return pieces


def row_pieces(query_runs: Sequence[Run], key_runs: Sequence[Run], window: int | None = None) -> list[Piece]:
    """Return pieces that cover every visible (query, key) pair exactly once, for ``AttentionBackend.prepare_rows``.

    Without a window, the adjacent rows that a run of queries sees form one piece.
    """
    key_rows: defaultdict[int, list[tuple[Run, slice]]] = defaultdict(list)
    for key, rows in zip(key_runs, _rows_of(key_runs), strict=True):
        if key.count:
            key_rows[key.request].append((key, rows))
    pieces: list[Piece] = []
    for query, query_rows in zip(query_runs, _rows_of(query_runs), strict=True):
        for key, rows in key_rows[query.request] if query.count else ():
            for piece in _of_pair(query, query_rows, key, rows, window):
                last = pieces[-1] if pieces and window is None else None
                if last and last.is_full and (last.query, last.key.stop) == (piece.query, piece.key.start):
                    pieces.pop()
                    keys = slice(last.key.start, piece.key.stop)
                    piece = piece._replace(key=keys, ahead=last.num_keys + piece.ahead)
                pieces.append(piece)
    return pieces


def split_keys(piece: Piece, most_keys: int) -> list[Piece]:
    """Divide a piece into pieces of at most ``most_keys`` keys. Each omits the queries that see none of its keys."""
    blocks = []
    for begin in range(0, piece.num_keys, most_keys):
        first = max(-((piece.ahead - begin) // max(piece.step, 1)), 0)
        block = piece._replace(
            query=slice(piece.query.start + first, piece.query.stop),
            key=slice(piece.key.start + begin, piece.key.start + min(begin + most_keys, piece.num_keys)),
            ahead=piece.ahead - begin + first * piece.step,
            behind=None,
        )
        blocks += [block] if piece.behind is None else _from(block, piece.behind - begin + first * piece.step)
    return blocks


def pages_of(piece: Piece, page_size: int) -> tuple[slice, int]:
    """Return the slice of pages that hold a piece's keys, and the first key's slot within that slice."""
    first_page = piece.key.start // page_size
    return slice(first_page, pages_for(piece.key.stop, page_size)), piece.key.start - first_page * page_size


def _rows_of(runs: Sequence[Run]) -> list[slice]:
    ends = list(accumulate((run.count for run in runs), initial=0))
    return [slice(begin, end) for begin, end in pairwise(ends)]


def _of_pair(query: Run, queries: slice, key: Run, keys: slice, window: int | None) -> list[Piece]:
    if window is None and key.last_position <= query.first_position:
        return [Piece(query.request, queries, keys, key.count - 1, 0)]
    step = key.step if query.count == 1 else query.step
    assert key.count == 1 or key.step == step, f"{query} overlaps {key}, whose step differs"
    distance = query.first_position - key.first_position
    # Query i of the run sees keys 0 to ahead + i, or none if ahead + i is negative.
    ahead = distance // step
    first = max(-ahead, 0)
    if first >= query.count:
        return []
    queries, ahead = slice(queries.start + first, queries.stop), max(ahead, 0)
    keys = slice(keys.start, keys.start + min(key.count, ahead + query.count - first))
    piece = Piece(query.request, queries, keys, ahead, 1)
    return [piece] if window is None else _from(piece, (distance + first * step - window) // step + 1)


def _from(piece: Piece, behind: int) -> list[Piece]:
    """Limit query i to keys from ``behind + i * step`` on. Drop queries without keys and keys without queries."""
    num_queries = min(piece.num_queries, -(-(piece.num_keys - behind) // max(piece.step, 1)))
    if num_queries <= 0 or behind > piece.ahead:
        return []
    skipped = max(behind, 0)
    behind -= skipped
    bounded = piece._replace(
        query=slice(piece.query.start, piece.query.start + num_queries),
        key=slice(piece.key.start + skipped, piece.key.stop),
        ahead=piece.ahead - skipped,
        behind=behind if behind + (num_queries - 1) * piece.step > 0 else None,
    )
    return [bounded]
