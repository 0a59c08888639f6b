"""Attention over keys and values that lie in rows, not in pages: what the ranks of a CP group send each other."""

from collections.abc import Sequence

from torch import Tensor

from workers.attention.extend import extend
from workers.attention.pieces import visible_pieces
from workers.context_parallel.merge import Partial, empty_partial, merge
from workers.context_parallel.runs import Run


class TorchRows:
    """See RowAttention."""

    def __init__(self, query_runs: Sequence[Run], key_runs: Sequence[Run]) -> None:
        self._pieces = visible_pieces(query_runs, key_runs)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Partial:
        """See RowAttention."""
        result = empty_partial(query)
        written: list[slice] = []
        key, value = key.transpose(0, 1), value.transpose(0, 1)
        for piece in self._pieces:
            partial = extend(query[piece.query], key[:, piece.key], value[:, piece.key], piece.ahead)
            seen = Partial(result.out[piece.query], result.lse[piece.query])
            if any(rows.start < piece.query.stop and piece.query.start < rows.stop for rows in written):
                partial = merge([seen, partial])
            seen.out.copy_(partial.out)
            seen.lse.copy_(partial.lse)
            written.append(piece.query)
        return Partial(result.out, result.lse)
