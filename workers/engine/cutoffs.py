"""Where top-k and top-p end: all tokens but the likeliest of each row are put out of the draw."""

import math

import torch
from torch import Tensor

from workers.device import has_kernels
from workers.engine.draw_settings import DrawSettings

_NUM_RANKED = 1024
"""Tokens that are ranked at first; few rows must look further to know where their top-p ends."""


def keep_likeliest(scores: Tensor, settings: DrawSettings) -> Tensor:
    """Scores with everything outside the top-k, then outside the smallest set of mass top-p, at -inf.

    Equals of the last token that is kept are kept too, so that neither an order among them nor rounding, which may
    differ with the company in the batch, changes what is drawn.
    """
    vocab_size = scores.shape[-1]
    top_k, top_p = settings.top_k, settings.top_p
    cutoffs, is_sure = ranked_cutoffs(scores, top_k, top_p, min(vocab_size, _NUM_RANKED))
    if has_kernels(scores):
        from workers.kernels.cutoffs import find_cutoffs

        find_cutoffs(scores, top_k, top_p, is_sure, cutoffs)
    elif not is_sure.all():
        unsure = ~is_sure
        cutoffs[unsure], _ = ranked_cutoffs(scores[unsure], top_k[unsure], top_p[unsure], vocab_size)
    rounding = settings.rounding.to(scores.dtype)
    return scores.masked_fill(scores < (cutoffs - rounding)[:, None], -math.inf)


def ranked_cutoffs(scores: Tensor, top_k: Tensor, top_p: Tensor, num_ranked: int) -> tuple[Tensor, Tensor]:
    """Each row's least score to keep, and whether that many likeliest tokens suffice to know it; both ``[num_rows]``.

    Scores are at most 0, and 0 for the likeliest. Of each row: top_k int64, at least 1; top_p fp64.
    """
    top_k, top_p = top_k[:, None], top_p[:, None]
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
