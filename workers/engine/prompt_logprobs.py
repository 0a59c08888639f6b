"""Log-probabilities of prompt tokens. Each rank scores the tokens it computes, a few at a time."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cluster.spec.sampling import TokenLogprobs
from workers.context_parallel.exchange import join_rows
from workers.device import on_device
from workers.engine.batch import StepBatch
from workers.models.decoder import DecoderModel
from workers.parallel.collectives import Communicator

_MAX_LOGITS = 2**23
"""Maximum number of logits in memory at once: 32 MiB."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Prompt log-probabilities requested for one scheduled request."""

    scored_ids: Sequence[int]
    """Prompt tokens to score, each following one of the step's tokens; empty if none are requested."""
    num_top: int


def prompt_logprobs(
    model: DecoderModel, group: Communicator, batch: StepBatch, hidden: Tensor, asked: Sequence[Asked]
) -> list[list[TokenLogprobs]]:
    """Return, on the first rank of each CP group, one entry per scored token for every scheduled request.

    All ranks call it. ``hidden [tokens, hidden]`` is this rank's, after the final norm.
    """
    plan = batch.plan
    if plan.replicated and batch.cp_rank > 0:
        return []
    scored = np.full(plan.num_tokens, -1, dtype=np.int64)
    for start, request in zip(plan.starts, asked, strict=False):
        scored[start : start + len(request.scored_ids)] = request.scored_ids
    local = on_device(torch.from_numpy(scored[plan.local(batch.cp_rank)]), hidden.device)
    scores = join_rows(group, plan, _scores(model, hidden, local, max(request.num_top for request in asked)))
    if batch.cp_rank > 0:
        return []
    ends = [(start, start + len(request.scored_ids)) for start, request in zip(plan.starts, asked, strict=False)]
    return [
        [_token_logprobs(entry, request.num_top) for entry in scores[start:end].tolist()]
        for (start, end), request in zip(ends, asked, strict=True)
    ]


def _scores(model: DecoderModel, hidden: Tensor, scored: Tensor, num_top: int) -> Tensor:
    """``[tokens, 2 + 2 * num_top]`` fp32: log-probability and rank of each scored token, then the likeliest tokens and
    their log-probabilities.

    Token ids are exact in fp32 up to 2^24. Rows without a scored token, which is then -1, hold zeros.
    """
    vocab_size = model.config.vocab_size
    num_top = min(num_top, vocab_size)
    scores = torch.zeros(len(hidden), 2 + 2 * num_top, device=hidden.device)
    for part in torch.split((scored >= 0).nonzero().squeeze(-1), max(1, _MAX_LOGITS // vocab_size)):
        logprobs = model.logits(hidden[part]).log_softmax(dim=-1)
        own = logprobs.gather(-1, scored[part][:, None])
        rank = (logprobs > own).sum(dim=-1, keepdim=True) + 1
        top = logprobs.topk(num_top, dim=-1)
        scores[part] = torch.cat([own, rank, top.indices, top.values], dim=-1)
    return scores


def _token_logprobs(entry: list[float], num_top: int) -> TokenLogprobs:
    middle = 2 + (len(entry) - 2) // 2
    return TokenLogprobs(
        logprob=entry[0],
        rank=int(entry[1]),
        top_ids=[int(token_id) for token_id in entry[2:middle][:num_top]],
        top_logprobs=entry[middle:][:num_top],
    )
