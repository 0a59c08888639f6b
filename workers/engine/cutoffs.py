"""Top-k and top-p cutoffs: tokens outside them cannot be sampled."""

import math

import torch
from torch import Tensor

from workers.device import has_kernels
from workers.engine.draw_settings import DrawSettings

_NUM_RANKED = 1024
"""Tokens ranked at first; few rows must look further to find the end of their top-p."""


def keep_likeliest(scores: Tensor, settings: DrawSettings) -> Tensor:
    """Return scores with everything outside the top-k, then outside the smallest set of mass top-p, at -inf.

    Tokens equal to the last one kept are kept too, so that neither their order nor rounding, which may depend on the
    other rows of the batch, changes the sample.
    """
    vocab_size = scores.shape[-1]
    top_k, top_p = settings.top_k, settings.top_p
    cutoffs, is_sure = ranked_cutoffs(scores, top_k, top_p, min(vocab_size, _NUM_RANKED))
    if has_kernels(scores):
        from workers.kernels.sampling import find_cutoffs

        find_cutoffs(scores, top_k, top_p, is_sure, cutoffs)
    elif not is_sure.all():
        unsure = ~is_sure
        cutoffs[unsure], _ = ranked_cutoffs(scores[unsure], top_k[unsure], top_p[unsure], vocab_size)
    rounding = settings.rounding.to(scores.dtype)
    return scores.masked_fill(scores < (cutoffs - rounding)[:, None], -math.inf)


def ranked_cutoffs(scores: Tensor, top_k: Tensor, top_p: Tensor, num_ranked: int) -> tuple[Tensor, Tensor]:
    """Return each row's least score to keep, and whether ranking ``num_ranked`` tokens was enough to find it; both
    ``[num_rows]``.

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
    # Top-p applies to the mass that top-k leaves, which is known if that is ranked, or is everything.
    is_sure = (top_k <= num_ranked) | (is_beyond[:, -1:] & (top_k >= vocab_size)) | (num_ranked == vocab_size)
    return ranked.gather(-1, num_kept - 1).squeeze(-1), is_sure.squeeze(-1)
