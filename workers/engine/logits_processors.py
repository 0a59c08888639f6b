"""Changes that requests make to logits before sampling: allowed tokens, bias and bans, penalties, grammars.

Work is proportional to the tokens that are named, with a grammar to the vocabulary: rows that ask for nothing cost
nothing. No row depends on another.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.device import index_on, on_device
from workers.engine.sampling_state import SamplingState
from workers.engine.token_counts import TokenCounts

Numbers = NDArray[np.float32]
Index = tuple[Tensor, Tensor]
"""Row and column indices of single logits, each once."""


def process(logits: Tensor, states: Sequence[SamplingState], positions: Sequence[int]) -> None:
    """Change logits ``[num_rows, vocab_size]`` in place. positions: each row's output position."""
    asking = {row: state for row, state in enumerate(states) if state.asks}
    grammars = {row: state.grammar for row, state in asking.items() if state.grammar is not None}
    before = logits[index_on(list(grammars), logits.device)] if grammars else logits
    _forbid_others(logits, {row: state.allowed for row, state in asking.items() if len(state.allowed)})
    shifts = {row: state.shifts(positions[row]) for row, state in asking.items()}
    _shift(logits, {row: shift for row, shift in shifts.items() if len(shift[0])})
    _penalise(logits, states, {row: state.counts for row, state in asking.items() if state.counts is not None})
    _keep_to(logits, before, {row: grammar.allowed(positions[row]) for row, grammar in grammars.items()})


def _forbid_others(logits: Tensor, allowed: Mapping[int, NDArray[np.int64]]) -> None:
    if allowed:
        index = _index(allowed, logits)
        kept = logits[index]
        logits[index_on(list(allowed), logits.device)] = -math.inf
        logits[index] = kept


def _keep_to(logits: Tensor, before: Tensor, grammars: Mapping[int, NDArray[np.bool_]]) -> None:
    """Apply allowed tokens and grammars; a grammar comes last, and wins if nothing else is left of what it allows.

    before: unchanged logits of the rows with grammars.
    """
    if not grammars:
        return
    rows = index_on(list(grammars), logits.device)
    is_out = on_device(torch.from_numpy(~np.stack(list(grammars.values()))), logits.device)
    kept = logits[rows].masked_fill_(is_out, -math.inf)
    is_empty = kept.amax(dim=-1, keepdim=True) == -math.inf
    logits[rows] = torch.where(is_empty, before.masked_fill_(is_out, -math.inf), kept)


def _shift(logits: Tensor, shifts: Mapping[int, tuple[NDArray[np.int64], Numbers]]) -> None:
    if shifts:
        index = _index({row: ids for row, (ids, _) in shifts.items()}, logits)
        logits[index] += _tensor([values for _, values in shifts.values()], logits)


def _penalise(logits: Tensor, states: Sequence[SamplingState], counted: Mapping[int, TokenCounts]) -> None:
    """Apply penalties: repetition as in Keskar et al. 2019 (arXiv:1909.05858), then frequency and presence as in
    OpenAI's API.
    """
    if not counted:
        return

    def spread(setting: str) -> Tensor:
        """Expand a setting of each row to all tokens of the row."""
        values = [getattr(states[row].sampling, setting) for row in counted]
        return _tensor(
            [np.repeat(np.array(values, np.float32), [len(known.ids) for known in counted.values()])], logits
        )

    index = _index({row: known.ids for row, known in counted.items()}, logits)
    counts = _tensor([known.counts for known in counted.values()], logits)
    repetition = spread("repetition_penalty")
    before = logits[index]
    scaled = torch.where(before > 0, before / repetition, before * repetition)
    logits[index] = scaled - spread("frequency_penalty") * counts - spread("presence_penalty") * (counts > 0)


def _index(ids: Mapping[int, NDArray[np.int64]], like: Tensor) -> Index:
    rows = np.repeat(np.array(list(ids), np.int64), [len(part) for part in ids.values()])
    columns = np.concatenate(list(ids.values()))
    return on_device(torch.from_numpy(rows), like.device), on_device(torch.from_numpy(columns), like.device)


def _tensor(parts: Sequence[Numbers], like: Tensor) -> Tensor:
    return on_device(torch.from_numpy(np.concatenate(parts)), like.device)
