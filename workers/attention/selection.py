"""Choice of the keys that score highest for a query, and attention to chosen keys.

The choice is exact: of keys with equal scores, those at lower positions are chosen. It therefore does not depend on
tiles, chunks, batches or ranks, except as far as they change the rounding of a score.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.attention.limits import MOST_SCORED, MOST_SELECTED
from workers.attention.merge import Partial
from workers.device import device_of

NO_KEY = -1
"""Number in place of a key where a query uses fewer keys than others."""
_FINITE = torch.finfo(torch.float32)


class IndexQueries(NamedTuple):
    """An indexer's queries of some tokens.

    A key k has the score sum_h(weights_h * relu(q_h . k)), as in DeepSeek-V3.2 (arXiv:2512.02556, equation 1).
    """

    q: Tensor
    """``[queries, heads, dim]``, rotated."""
    weights: Tensor
    """``[queries, heads]`` fp32, which include all constant factors."""

    def rows(self, rows: slice) -> "IndexQueries":
        return IndexQueries(self.q[rows], self.weights[rows])


class Chosen(NamedTuple):
    """Keys chosen for some queries, in ascending order."""

    scores: Tensor
    """``[queries, keys]`` fp32. -inf for a key that does not count."""
    keys: Tensor
    """``[queries, keys]`` int64: numbers, or positions, of the keys."""


class TorchSelection:
    """Selection in plain torch, on any device, a tile of keys or a few queries at a time."""

    queries_at_once = 64

    def best_keys(
        self, index: IndexQueries, keys: Tensor, table: Tensor, num_visible: NDArray[np.int64], top_k: int
    ) -> Chosen:
        """See ``AttentionBackend``."""
        visible = device_of(keys).put(torch.from_numpy(num_visible))[:, None]
        best = Chosen(index.weights.new_empty(len(visible), 0), visible.new_empty(len(visible), 0))
        widest = max(index.weights.numel(), keys.shape[-1])
        for begin, tile in _tiles(keys, table, int(num_visible[-1]), MOST_SCORED // widest):
            numbers = torch.arange(begin, begin + len(tile), device=keys.device)
            scores = index_scores(index, tile)
            if begin + len(tile) > num_visible[0]:
                scores.masked_fill_(numbers >= visible, -torch.inf)
            both = zip(best, (scores, numbers.expand_as(scores)), strict=True)
            best = best_keys(Chosen(*(torch.cat(pair, dim=1) for pair in both)), top_k)
        return best

    def attend_selected(
        self, query: Tensor, keys: Tensor, table: Tensor, selected: Tensor, scale: float, out: Partial
    ) -> None:
        """See ``AttentionBackend``."""
        page_size, value_dim = keys.shape[2], out.out.shape[-1]
        step = max(MOST_SELECTED // max(selected.shape[1] * query.shape[-1], 1), 1)
        for first in range(0, len(query), step):
            mine = slice(first, first + step)
            numbers = trimmed(selected[mine]).long()
            is_seen, numbers = numbers != NO_KEY, numbers.clamp(min=0)
            rows = keys[:, 0][table[numbers // page_size], numbers % page_size].float()
            # A slot that no query sees may hold NaN, which no weight can hide.
            rows.masked_fill_(~is_seen[..., None], 0.0)
            for whole, part in zip(out, attend_rows(query[mine], rows, is_seen, scale, value_dim), strict=True):
                whole[mine] = part


def trimmed(selected: Tensor) -> Tensor:
    """Drop the columns of ``selected [queries, n]`` that no query needs."""
    return selected[:, : int((selected != NO_KEY).sum(-1).amax())]


def _tiles(keys: Tensor, table: Tensor, num_keys: int, most_keys: int) -> Iterator[tuple[int, Tensor]]:
    """Yield tiles ``[n, dim]`` of a request's first keys, each with the number of its first key.

    A tile has at most ``most_keys`` keys, or one page.
    """
    page_size = keys.shape[2]
    num_pages = max(most_keys // page_size, 1)
    for begin in range(0, num_keys, num_pages * page_size):
        rows = keys[:, 0].index_select(0, table[begin // page_size :][:num_pages]).flatten(0, 1)
        yield begin, rows[: num_keys - begin]


def index_scores(index: IndexQueries, keys: Tensor) -> Tensor:
    """Return finite scores ``[queries, n]`` fp32 of ``keys [n, dim]``."""
    products = index.q.float().flatten(0, 1) @ keys.float().T
    by_head = products.view(*index.weights.shape, len(keys)).relu_()
    # NaN would make the number of best keys ambiguous.
    return torch.bmm(index.weights[:, None], by_head)[:, 0].nan_to_num_(_FINITE.min, _FINITE.max, _FINITE.min)


def best_keys(found: Chosen, top_k: int) -> Chosen:
    """Return the ``top_k`` keys with the highest scores, or all if there are no more, in ascending order."""
    if found.scores.shape[1] <= top_k:
        return found
    worst = found.scores.topk(top_k, sorted=False).values.amin(-1, keepdim=True)
    is_better, is_tied = found.scores > worst, found.scores == worst
    num_tied = top_k - is_better.sum(-1, keepdim=True)
    is_chosen = is_better | (is_tied & (is_tied.cumsum(-1) <= num_tied))
    columns = is_chosen.nonzero()[:, 1].view(-1, top_k)
    return Chosen(found.scores.gather(1, columns), found.keys.gather(1, columns))


def are_among_best(own: Chosen, everyone: Chosen, top_k: int) -> Tensor:
    """Return which of ``own`` keys are among the ``top_k`` best of ``everyone``'s, bool ``[queries, keys]``.

    Keys are given by position. Those of ``everyone`` can be in any order.
    """
    order = everyone.keys.argsort(-1)
    best = best_keys(Chosen(everyone.scores.gather(1, order), everyone.keys.gather(1, order)), top_k)
    worst = best.scores.amin(-1, keepdim=True)
    last_tied = best.keys.masked_fill(best.scores > worst, -1).amax(-1, keepdim=True)
    is_best = (own.scores > worst) | ((own.scores == worst) & (own.keys <= last_tied))
    return is_best & (own.scores > -torch.inf)


def attend_rows(query: Tensor, rows: Tensor, is_seen: Tensor, scale: float, value_dim: int) -> Partial:
    """Return attention of each query to rows of its own, in fp32.

    ``query [B, heads, D]``; ``rows [B, n, D]`` fp32, finite, whose first ``value_dim`` elements are the values;
    ``is_seen [B, n]`` bool.
    """
    scores = torch.bmm(query.float() * scale, rows.transpose(1, 2)).masked_fill_(~is_seen[:, None], -torch.inf)
    lse = scores.logsumexp(-1)
    weights = scores.sub_(lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp_()
    return Partial(torch.bmm(weights, rows[..., :value_dim]), lse)
