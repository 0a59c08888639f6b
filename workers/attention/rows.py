"""Attention over keys and values that lie in rows, not in pages: what the ranks of a CP group send each other."""

from collections.abc import Sequence

from torch import Tensor

from workers.attention.paged import flash
from workers.attention.pieces import visible_pieces
from workers.context_parallel.merge import Partial, empty_partial, merge
from workers.context_parallel.runs import Run


class TorchRows:
    """See RowAttention."""

    def __init__(self, query_runs: Sequence[Run], key_runs: Sequence[Run]) -> None:
        self._pieces = visible_pieces(query_runs, key_runs)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Partial:
        """See RowAttention."""
        result = empty_partial(query.float())
        for piece in self._pieces:
            seen = Partial(result.out[piece.query], result.lse[piece.query])
            out, lse = merge([seen, _attend(query[piece.query], key[piece.key], value[piece.key], piece.causal)])
            result.out[piece.query] = out
            result.lse[piece.query] = lse
        return Partial(result.out.to(query.dtype), result.lse)


def _attend(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Partial:
    groups = query.shape[1] // key.shape[1]
    key, value = (x.transpose(0, 1).repeat_interleave(groups, 0)[None] for x in (key, value))
    out, lse = flash(query.transpose(0, 1)[None], key, value, causal=causal)
    return Partial(out[0].transpose(0, 1), lse[0].transpose(0, 1))
