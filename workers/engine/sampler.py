"""From logits to tokens. A draw depends on its row's seed and output position, and on nothing else in the batch."""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cluster.spec.messages import Sampling


def sample(logits: Tensor, rows: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
    """One token id a row.

    logits: [num_rows, vocab_size] fp32. positions: each row's output position (0 for the first generated token).
    temperature 0 takes the likeliest token (the first of equals). Otherwise temperature, top-k, top-p and min-p apply
    in this order, each to what the one before left.
    """
    assert logits.shape[0] == len(rows) == len(positions)
    chosen = logits.argmax(dim=-1)
    drawn = [index for index, row in enumerate(rows) if row.temperature > 0]
    if drawn:
        uniforms = [uniform(rows[index].seed, positions[index]) for index in drawn]
        chosen[drawn] = _draw(logits[drawn], [rows[index] for index in drawn], uniforms)
    return [int(token_id) for token_id in chosen.tolist()]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) fixed by its arguments alone, the same on every machine."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    # 52 bits, so that uniform * total stays below total in double precision.
    return float((int.from_bytes(digest, "little") >> 12) / 2**52)


def _draw(logits: Tensor, rows: Sequence[Sampling], uniforms: Sequence[float]) -> Tensor:
    """Inverse transform over the vocabulary in id order, so that filters never change which end a draw falls on."""
    scores = (logits - logits.amax(dim=-1, keepdim=True)) / _column([row.temperature for row in rows], logits)
    sorting = [index for index, row in enumerate(rows) if row.top_k > 0 or row.top_p < 1]
    if sorting:
        scores[sorting] = _keep_likeliest(scores[sorting], [rows[index] for index in sorting])
    floor = _column([math.log(row.min_p) if row.min_p > 0 else -math.inf for row in rows], logits)
    weights = scores.masked_fill(scores < floor, -math.inf).exp().double()
    cumulative = weights.cumsum(dim=-1)
    targets = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, targets, right=True).squeeze(-1)


def _keep_likeliest(scores: Tensor, rows: Sequence[Sampling]) -> Tensor:
    """Scores with everything outside the top-k, then outside the smallest set of mass top-p, at -inf."""
    ranked, order = scores.sort(dim=-1, descending=True, stable=True)
    vocab_size = scores.shape[-1]
    top_k = _column([row.top_k or vocab_size for row in rows], scores)
    outside = torch.arange(vocab_size, device=scores.device) >= top_k
    ranked = ranked.masked_fill(outside, -math.inf)
    likelihoods = ranked.softmax(dim=-1, dtype=torch.float64)
    mass_before = likelihoods.cumsum(dim=-1) - likelihoods
    beyond = mass_before >= torch.tensor([[row.top_p] for row in rows], dtype=torch.float64, device=scores.device)
    beyond[:, 0] = False
    return torch.empty_like(scores).scatter_(-1, order, ranked.masked_fill(beyond, -math.inf))


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
