"""What requests change in their logits before a token is drawn: bias, bans, then penalties.

Rows that ask for nothing cost nothing, and no row depends on another.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from workers.engine.sampling_state import SamplingState


def process(logits: Tensor, states: Sequence[SamplingState], positions: Sequence[int]) -> None:
    """Change logits ``[num_rows, vocab_size]`` in place. positions: each row's output position."""
    _add_bias(logits, states)
    _ban(logits, states, positions)
    _penalise(logits, states)


def _add_bias(logits: Tensor, states: Sequence[SamplingState]) -> None:
    biased = {index: state.bias for index, state in enumerate(states) if state.bias is not None}
    if biased:
        logits[list(biased)] += torch.stack(list(biased.values()))


def _ban(logits: Tensor, states: Sequence[SamplingState], positions: Sequence[int]) -> None:
    """Forbid tokens; a row that would be left without any keeps them, since a token must be drawn."""
    bans = [(index, token_id) for index, state in enumerate(states) for token_id in state.banned(positions[index])]
    if not bans:
        return
    rows = sorted({index for index, _ in bans})
    before = logits[rows]
    indices = torch.tensor(bans, device=logits.device).T
    logits[indices[0], indices[1]] = -math.inf
    after = logits[rows]
    is_empty = after.amax(dim=-1, keepdim=True) == -math.inf
    logits[rows] = torch.where(is_empty, before, after)


def _penalise(logits: Tensor, states: Sequence[SamplingState]) -> None:
    """Repetition as Keskar et al. 2019 (arXiv:1909.05858), then frequency and presence as OpenAI's API."""
    rows = [index for index, state in enumerate(states) if state.sampling.has_penalties]
    if not rows:
        return
    counts = torch.stack([_known(states[index].output_counts) for index in rows])
    in_output = counts > 0
    seen = in_output | torch.stack([_known(states[index].in_prompt) for index in rows])
    settings = [states[index].sampling for index in rows]
    repetition = _column([row.repetition_penalty for row in settings], logits)
    frequency = _column([row.frequency_penalty for row in settings], logits)
    presence = _column([row.presence_penalty for row in settings], logits)
    before = logits[rows]
    scaled = torch.where(before > 0, before / repetition, before * repetition)
    logits[rows] = torch.where(seen, scaled, before) - frequency * counts - presence * in_output


def _known(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "a request with penalties counts its tokens"
    return tensor


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
