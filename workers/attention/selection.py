"""Choice of the keys that score highest for a query, and attention to chosen keys.

The choice is exact: of keys with equal scores, those at lower positions are chosen. It therefore does not depend on
tiles, chunks, batches or ranks, except as far as they change the rounding of a score.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.attention.merge import Partial

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


class QueryRun(NamedTuple):
    """Adjacent queries of one request, and the keys that they see."""

    rows: slice
    """Rows of the step's queries."""
    table: Tensor
    """The request's pages, int64, in order of position."""
    num_visible: NDArray[np.int64]
    """Number of the pages' first keys that each query sees, in ascending order."""


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
    columns = _is_best(found.scores, top_k).nonzero()[:, 1].view(-1, top_k)
    return Chosen(found.scores.gather(1, columns), found.keys.gather(1, columns))


def _is_best(scores: Tensor, top_k: int) -> Tensor:
    """Return which scores are among the ``top_k`` best of their row, of equal ones the first, bool ``[queries, n]``."""
    worst = scores.topk(min(top_k, scores.shape[1]), sorted=False).values.amin(-1, keepdim=True)
    is_better, is_tied = scores > worst, scores == worst
    num_tied = top_k - is_better.sum(-1, keepdim=True)
    return is_better | (is_tied & (is_tied.cumsum(-1) <= num_tied))


def are_among_best(own: Chosen, everyone: Chosen, top_k: int) -> Tensor:
    """Return which of ``own`` keys are among the ``top_k`` best of ``everyone``'s, bool ``[queries, keys]``.

    Keys are given by position. Those of ``everyone`` can be in any order. On a GPU, the host does not wait.
    """
    order = everyone.keys.argsort(-1)
    scores, keys = everyone.scores.gather(1, order), everyone.keys.gather(1, order)
    is_chosen = _is_best(scores, top_k)
    worst = scores.masked_fill(~is_chosen, torch.inf).amin(-1, keepdim=True)
    last_tied = keys.masked_fill(~is_chosen | (scores > worst), NO_KEY).amax(-1, keepdim=True)
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
