"""From logits to tokens. A draw depends on its request and its output position, and on nothing else in the batch."""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cluster.spec.sampling import Sampled, Sampling, TokenLogprobs
from workers.engine.logits_processors import process
from workers.engine.sampling_state import SamplingState

_GREEDY_BELOW = 1e-5
"""Temperatures that leave nothing but the likeliest token, and would divide by zero in fp32 at last."""

_ROUNDING = 1e-4
"""Logits in fp32 that differ by less may be equals."""

_NUM_RANKED = 1024
"""Tokens that are ranked at first; few rows must look further to know where their top-p ends."""


def sample(logits: Tensor, states: Sequence[SamplingState], positions: Sequence[int]) -> list[Sampled]:
    """One token a row, which its state takes note of.

    logits: [num_rows, vocab_size] fp32, as the model gives them; changed in place. positions: each row's output
    position (0 for the first generated token).
    """
    assert logits.shape[0] == len(states) == len(positions)
    asked = {index: num for index, state in enumerate(states) if (num := state.sampling.num_logprobs) is not None}
    unprocessed = logits[list(asked)] if asked else logits
    process(logits, states, positions)
    token_ids = draw(logits, [state.sampling for state in states], positions)
    logprobs: dict[int, TokenLogprobs] = {}
    if asked:
        told = _logprobs(unprocessed, [token_ids[index] for index in asked], list(asked.values()))
        logprobs = dict(zip(asked, told, strict=True))
    for state, token_id in zip(states, token_ids, strict=True):
        state.append(token_id)
    return [
        _sampled(state, token_id, logprobs.get(index))
        for index, (state, token_id) in enumerate(zip(states, token_ids, strict=True))
    ]


def _sampled(state: SamplingState, token_id: int, logprobs: TokenLogprobs | None) -> Sampled:
    if state.grammar is None:
        return Sampled(token_id=token_id, logprobs=logprobs)
    return Sampled(token_id=token_id, logprobs=logprobs, is_last=state.grammar.is_whole, problem=state.grammar.problem)


def draw(logits: Tensor, rows: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
    """One token id a row.

    A temperature below 1e-5, or a top-k of 1, takes the likeliest token (the first of equals). Otherwise temperature,
    top-k, top-p and min-p apply in this order, each to what the one before left.
    """
    drawn = [index for index, row in enumerate(rows) if row.temperature >= _GREEDY_BELOW and row.top_k != 1]
    chosen = _likeliest(logits) if len(drawn) < len(rows) else [0] * len(rows)
    if drawn:
        uniforms = [uniform(rows[index].seed, positions[index]) for index in drawn]
        token_ids = _draw(logits[drawn], [rows[index] for index in drawn], uniforms).tolist()
        for index, token_id in zip(drawn, token_ids, strict=True):
            chosen[index] = token_id
    return chosen


def _likeliest(logits: Tensor) -> list[int]:
    """On a CPU numpy finds it several times as fast as torch."""
    on_cpu = logits.device.type == "cpu"
    token_ids: list[int] = (logits.numpy().argmax(axis=-1) if on_cpu else logits.argmax(dim=-1)).tolist()
    return token_ids


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) fixed by its arguments alone, the same on every machine."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    # 52 bits, so that uniform * total stays below total in double precision.
    return float((int.from_bytes(digest, "little") >> 12) / 2**52)


def _logprobs(logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Of one token a row, and the row's likeliest."""
    logprobs = logits.log_softmax(dim=-1)
    own = logprobs.gather(-1, torch.tensor(token_ids, device=logits.device)[:, None]).squeeze(-1).tolist()
    top = logprobs.topk(min(max(num_top), logits.shape[-1]), dim=-1)
    return [
        TokenLogprobs(logprob=logprob, top_ids=ids[:num], top_logprobs=values[:num])
        for logprob, ids, values, num in zip(own, top.indices.tolist(), top.values.tolist(), num_top, strict=True)
    ]


def _draw(logits: Tensor, rows: Sequence[Sampling], uniforms: Sequence[float]) -> Tensor:
    """Inverse transform over the vocabulary in id order, so that filters never change which end a draw falls on."""
    scores = (logits - logits.amax(dim=-1, keepdim=True)) / _column([row.temperature for row in rows], logits)
    sorting = [index for index, row in enumerate(rows) if row.top_k > 0 or row.top_p < 1]
    if sorting:
        scores[sorting] = _keep_likeliest(scores[sorting], [rows[index] for index in sorting])
    floor = _column([math.log(row.min_p) if row.min_p > 0 else -math.inf for row in rows], logits)
    weights = scores.masked_fill(scores < floor, -math.inf).exp()
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    targets = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, targets, right=True).squeeze(-1)


def _keep_likeliest(scores: Tensor, rows: Sequence[Sampling]) -> Tensor:
    """Scores with everything outside the top-k, then outside the smallest set of mass top-p, at -inf.

    Equals of the last token that is kept are kept too, so that neither an order among them nor rounding, which may
    differ with the company in the batch, changes what is drawn.
    """
    vocab_size = scores.shape[-1]
    cutoffs, is_sure = _cutoffs(scores, rows, min(vocab_size, _NUM_RANKED))
    unsure = (~is_sure).nonzero().squeeze(-1).tolist()
    if unsure:
        cutoffs[unsure], _ = _cutoffs(scores[unsure], [rows[index] for index in unsure], vocab_size)
    rounding = _column([_ROUNDING / row.temperature for row in rows], scores)
    return scores.masked_fill(scores < cutoffs - rounding, -math.inf)


def _cutoffs(scores: Tensor, rows: Sequence[Sampling], num_ranked: int) -> tuple[Tensor, Tensor]:
    """Each row's least score to keep ``[num_rows, 1]``, and whether that many likeliest tokens suffice to know it.

    Scores are at most 0, and 0 for the likeliest.
    """
    ranked = scores.topk(num_ranked, dim=-1).values
    top_k = torch.tensor([[row.top_k or scores.shape[-1]] for row in rows], device=scores.device)
    top_p = torch.tensor([[row.top_p] for row in rows], dtype=torch.float64, device=scores.device)
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
    return ranked.gather(-1, num_kept - 1), is_sure.squeeze(-1)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
