"""Where top-k and top-p end: all tokens but the likeliest of each row are put out of the draw."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cluster.spec.sampling import Sampling
from workers.device import on_device
from workers.kernel_devices import has_kernels

_ROUNDING = 1e-4
"""Logits in fp32 that differ by less may be equals."""

_NUM_RANKED = 1024
"""Tokens that are ranked at first; few rows must look further to know where their top-p ends."""


def keep_likeliest(scores: Tensor, rows: Sequence[Sampling]) -> Tensor:
    """Scores with everything outside the top-k, then outside the smallest set of mass top-p, at -inf.

    Equals of the last token that is kept are kept too, so that neither an order among them nor rounding, which may
    differ with the company in the batch, changes what is drawn.
    """
    vocab_size = scores.shape[-1]
    limits = Limits.of(rows, scores)
    cutoffs, is_sure = ranked_cutoffs(scores, limits, min(vocab_size, _NUM_RANKED))
    if has_kernels(scores):
        from workers.kernels.cutoffs import find_cutoffs

        find_cutoffs(scores, *limits, is_sure, cutoffs)
    elif not is_sure.all():
        unsure = ~is_sure
        left = Limits(limits.top_k[unsure], limits.top_p[unsure])
        cutoffs[unsure], _ = ranked_cutoffs(scores[unsure], left, vocab_size)
    rounding = on_device(torch.tensor([[_ROUNDING / row.temperature] for row in rows]), scores.device)
    return scores.masked_fill(scores < cutoffs[:, None] - rounding, -math.inf)


class Limits(NamedTuple):
    """``[num_rows]``, where the scores are."""

    top_k: Tensor
    top_p: Tensor

    @classmethod
    def of(cls, rows: Sequence[Sampling], scores: Tensor) -> "Limits":
        top_k = torch.tensor([row.top_k or scores.shape[-1] for row in rows])
        top_p = torch.tensor([row.top_p for row in rows], dtype=torch.float64)
        return cls(on_device(top_k, scores.device), on_device(top_p, scores.device))


def ranked_cutoffs(scores: Tensor, limits: Limits, num_ranked: int) -> tuple[Tensor, Tensor]:
    """Each row's least score to keep, and whether that many likeliest tokens suffice to know it; both ``[num_rows]``.

    Scores are at most 0, and 0 for the likeliest.
    """
    top_k, top_p = (each[:, None] for each in limits)
    ranked = scores.topk(num_ranked, dim=-1).values
    is_outside = torch.arange(num_ranked, device=scores.device) >= top_k
    weights = ranked.exp().double().masked_fill(is_outside, 0.0)
    total = scores.exp().sum(dim=-1, keepdim=True, dtype=torch.float64)
    total = torch.where(top_k <= num_ranked, weights.sum(dim=-1, keepdim=True), total)
    is_beyond = (weights.cumsum(dim=-1) - weights >= top_p * total) & (top_p < 1)
    is_beyond[:, 0] = False
    num_kept = num_ranked - (is_outside | is_beyond).sum(dim=-1, keepdim=True)
    vocab_size = scores.shape[-1]
    # Top-p is a share of what top-k leaves; its mass is known where that is ranked, or is everything.
    is_sure = (top_k <= num_ranked) | (is_beyond[:, -1:] & (top_k >= vocab_size)) | (num_ranked == vocab_size)
    return ranked.gather(-1, num_kept - 1).squeeze(-1), is_sure.squeeze(-1)
