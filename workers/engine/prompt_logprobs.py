"""Prompt log-probabilities. Each rank scores the tokens that it computes, a few at a time."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cluster.spec.sampling import TokenLogprobs
from workers.context_parallel.exchange import join_rows
from workers.device import device_of
from workers.engine.batch import StepBatch
from workers.models.decoder import DecoderModel
from workers.parallel.communicator import Communicator

_MAX_LOGITS = 2**23
"""Maximum number of logits in memory (32 MiB)."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Prompt log-probabilities requested for one scheduled request."""

    scored_ids: Sequence[int]
    """Prompt tokens to score. Each follows one of the step's tokens."""
    num_top: int


def prompt_logprobs(
    model: DecoderModel, group: Communicator, batch: StepBatch, hidden: Tensor, asked: Sequence[Asked]
) -> list[list[TokenLogprobs]]:
    """Return one entry per scored token for every scheduled request, on the first rank of each CP group.

    All ranks call this with the final hidden states of their tokens, ``[tokens, hidden]``.
    """
    shards = batch.shards
    if shards.is_replicated and batch.cp_rank > 0:
        return []
    scored = np.full(shards.num_tokens, -1, dtype=np.int64)
    for start, request in zip(shards.starts, asked, strict=False):
        scored[start : start + len(request.scored_ids)] = request.scored_ids
    local = device_of(hidden).put(torch.from_numpy(scored[shards.local(batch.cp_rank)]))
    scores = join_rows(group, shards, _scores(model, hidden, local, max(request.num_top for request in asked)))
    if batch.cp_rank > 0:
        return []
    return [
        [_token_logprobs(entry, request.num_top) for entry in scores[start : start + len(request.scored_ids)].tolist()]
        for start, request in zip(shards.starts, asked, strict=False)
    ]


def _scores(model: DecoderModel, hidden: Tensor, scored: Tensor, num_top: int) -> Tensor:
    """Return each scored token's log-probability and rank, then the most likely tokens and their log-probabilities, as
    ``[tokens, 2 + 2 * num_top]`` fp32.

    Token ids are exact in fp32 up to 2^24. Rows whose ``scored`` is -1 are zero.
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
