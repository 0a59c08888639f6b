"""Sampling from logits. A sample depends only on its request and output position, not on the rest of the batch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cluster.spec.sampling import Sampled, Sampling, TokenLogprobs
from workers.device import Arriving, Device, device_of
from workers.engine.logits_processors import SamplingState, process
from workers.engine.token_race import key_of, win_race

_ROUNDING = 1e-4
"""Difference below which fp32 logits are considered equal."""
_NUM_SETTINGS, _NUM_WHOLE = 7, 3
"""Number of settings per row, and of leading settings that are integers."""
_NUM_RANKED = 1024
"""Number of likeliest tokens that are ranked at first. Few rows need more to find the end of their top-p."""
_FIRST_ON_CPU = 64
"""Number of likeliest tokens that a CPU ranks before that, which takes a third of the time."""
_GREEDY_BELOW = 1e-5
"""Temperature below which sampling is greedy. Dividing by much smaller temperatures would overflow fp32."""
_CACHED = 1 << 16
"""Number of scores that a CPU computes with at a time, so that they stay in its cache, unless a row has more."""


class DrawSettings:
    """Sampling settings as columns ``[num_rows]`` of one table, which needs only one copy to a GPU."""

    def __init__(self, table: Tensor) -> None:
        """Wrap ``table [settings, num_rows]`` int64. Its last rows hold the bits of fp64 numbers."""
        self._table = table
        self.indices, self.keys, self.top_k = table[:_NUM_WHOLE]
        """int64 columns: index among the step's rows, sampling key, and number of tokens to keep, at least 1."""
        self.top_p, self.temperature, self.floor, self.rounding = table[_NUM_WHOLE:].view(torch.float64)
        """fp64 columns: mass to keep, divisor, minimum score by min-p, and tolerance for equal scores."""

    @classmethod
    def of(
        cls,
        rows: Sequence[Sampling],
        positions: Sequence[int],
        indices: Sequence[int],
        vocab_size: int,
        device: Device,
    ) -> "DrawSettings":
        """Build the settings of rows whose temperature is above zero. ``positions`` are output positions."""
        table = np.empty((_NUM_SETTINGS, len(rows)), np.int64)
        table[0] = indices
        table[1] = [key_of(row.seed, position) for row, position in zip(rows, positions, strict=True)]
        table[2] = [row.top_k or vocab_size for row in rows]
        top_p, temperature, floor, rounding = table[_NUM_WHOLE:].view(np.float64)
        top_p[:] = [row.top_p for row in rows]
        temperature[:] = [row.temperature for row in rows]
        floor[:] = [math.log(row.min_p) if row.min_p > 0 else -math.inf for row in rows]
        rounding[:] = _ROUNDING / temperature
        return cls(device.put(torch.from_numpy(table)))

    def at(self, rows: slice) -> "DrawSettings":
        return DrawSettings(self._table[:, rows])


def least_likely(scores: Tensor, settings: DrawSettings) -> Tensor:
    """Return each row's lowest score in the top-k, and then in the smallest set with mass top-p, ``[num_rows]``.

    Tokens that score the same are kept too, so that the sample does not depend on their order or on rounding, which may
    depend on the other rows of the batch. So the result is slightly lower.
    """
    device, vocab_size = device_of(scores), scores.shape[-1]
    top_k, top_p = settings.top_k, settings.top_p
    first, *later = (_NUM_RANKED,) if device.has_kernels else (_FIRST_ON_CPU, _NUM_RANKED, vocab_size)
    cutoffs, is_sure = ranked_cutoffs(scores, top_k, top_p, min(first, vocab_size))
    for num_ranked in later:
        if not is_sure.all():
            unsure = (~is_sure).nonzero().squeeze(-1)
            found = ranked_cutoffs(scores[unsure], top_k[unsure], top_p[unsure], min(num_ranked, vocab_size))
            cutoffs[unsure], is_sure[unsure] = found
    if device.has_kernels:
        from workers.kernels.sampling import find_cutoffs

        find_cutoffs(scores, top_k, top_p, is_sure, cutoffs)
    cutoffs -= settings.rounding.to(scores.dtype)
    return cutoffs


def ranked_cutoffs(scores: Tensor, top_k: Tensor, top_p: Tensor, num_ranked: int) -> tuple[Tensor, Tensor]:
    """Return each row's lowest score to keep, and whether ranking ``num_ranked`` tokens was enough to find it. Both are
    ``[num_rows]``.

    The most likely token's score is 0. For each row, ``top_k`` is int64 and at least 1, and ``top_p`` is fp64.
    """
    vocab_size = scores.shape[-1]
    is_unlimited = (top_k >= vocab_size) & (top_p >= 1)
    top_k, top_p = top_k[:, None], top_p[:, None]
    ranked = scores.topk(num_ranked, dim=-1).values
    is_outside = torch.arange(num_ranked, device=scores.device) >= top_k
    weights = ranked.exp().double().masked_fill(is_outside, 0.0)
    total = weights.sum(dim=-1, keepdim=True)
    if device_of(scores).has_kernels or not (top_k <= num_ranked).all():
        total = torch.where(top_k <= num_ranked, total, scores.exp().sum(dim=-1, keepdim=True, dtype=torch.float64))
    is_beyond = (weights.cumsum(dim=-1) - weights >= top_p * total) & (top_p < 1)
    is_beyond[:, 0] = False
    num_kept = num_ranked - (is_outside | is_beyond).sum(dim=-1, keepdim=True)
    # Top-p applies to the mass that top-k leaves, which is known if all of it is ranked, or if top-k keeps everything.
    is_sure = (top_k <= num_ranked) | (is_beyond[:, -1:] & (top_k >= vocab_size)) | (num_ranked == vocab_size)
    cutoffs = ranked.gather(-1, num_kept - 1).squeeze(-1).masked_fill(is_unlimited, -math.inf)
    return cutoffs, is_sure.squeeze(-1) | is_unlimited


@dataclass(frozen=True, slots=True)
class PendingSamples:
    """Sampled tokens, one per row. On a GPU, they may still be in flight."""

    token_ids: Tensor
    """``[num_rows]`` int64, on the logits' device."""
    _states: Mapping[int, SamplingState]
    _num_top: Mapping[int, int]
    """Number of most likely tokens to report, by row. Only for rows that request them."""
    _arriving: Arriving
    """Sampled tokens in transit to the host, each row's greatest logit, and requested log-probabilities."""

    @property
    def is_there(self) -> bool:
        """Return whether `wait` would return immediately."""
        return self._arriving.is_there

    def wait(self) -> list[Sampled]:
        """Wait for the tokens and append them to the rows' states. Call this only once."""
        token_ids, greatest, *likelihoods = (part.tolist() for part in self._arriving.wait())
        reported = {
            row: TokenLogprobs(logprob=own, top_ids=ids[:num_top], top_logprobs=top[:num_top])
            for (row, num_top), own, top, ids in zip(self._num_top.items(), *likelihoods, strict=True)
        }
        for row, state in self._states.items():
            state.append(token_ids[row])
        return [
            # NaN is the greatest of any row that holds it.
            _sampled(self._states.get(row), token_id, reported.get(row), is_corrupted=not math.isfinite(logit))
            for row, (token_id, logit) in enumerate(zip(token_ids, greatest, strict=True))
        ]


def begin_sample(
    logits: Tensor, rows: Sequence[Sampling], states: Mapping[int, SamplingState], positions: Sequence[int]
) -> PendingSamples:
    """Start sampling one token per row.

    Args:
        logits: fp32 [num_rows, vocab_size] from the model, changed in place.
        rows: sampling parameters by row.
        states: sampling states of the rows whose settings change logits.
        positions: output positions by row, 0 for the first generated token.
    """
    assert logits.shape[0] == len(rows) == len(positions)
    asked = {index: num for index, row in enumerate(rows) if (num := row.num_logprobs) is not None}
    of_asked = device_of(logits).put_index(list(asked)) if asked else None
    unprocessed = logits[of_asked] if of_asked is not None else logits
    if states:
        process(logits, states, positions)
    greatest = logits.amax(dim=-1)
    token_ids = draw(logits, rows, positions)
    likelihoods = _likelihoods(unprocessed, token_ids[of_asked], max(asked.values())) if of_asked is not None else ()
    # Start the copy to the host now, since the next step may start before anyone waits for this one.
    return PendingSamples(token_ids, states, asked, Arriving(token_ids, greatest, *likelihoods))


def _sampled(
    state: SamplingState | None, token_id: int, logprobs: TokenLogprobs | None, *, is_corrupted: bool
) -> Sampled:
    if state is None or state.grammar is None:
        return Sampled(token_id=token_id, logprobs=logprobs, is_corrupted=is_corrupted)
    return Sampled(
        token_id=token_id,
        logprobs=logprobs,
        completes_grammar=state.grammar.is_over,
        problem=state.grammar.problem,
        is_corrupted=is_corrupted,
    )


def draw(logits: Tensor, rows: Sequence[Sampling], positions: Sequence[int]) -> Tensor:
    """Sample one token id per row, ``[num_rows]`` int64.

    With a temperature below 1e-5 or a top-k of 1, this is the most likely token (the first if several are equal).
    Otherwise temperature, top-k, top-p and min-p apply in this order, each to the remaining tokens.
    """
    sampled = [index for index, row in enumerate(rows) if row.temperature >= _GREEDY_BELOW and row.top_k != 1]
    device = device_of(logits)
    if not sampled:
        return device.argmax(logits)
    random_rows = [rows[index] for index in sampled]
    settings = DrawSettings.of(random_rows, [positions[index] for index in sampled], sampled, logits.shape[-1], device)
    if len(sampled) == len(rows):
        return _draw_at_random(logits, random_rows, settings)
    chosen = device.argmax(logits)
    chosen[settings.indices] = _draw_at_random(logits[settings.indices], random_rows, settings)
    return chosen


def _draw_at_random(logits: Tensor, rows: Sequence[Sampling], settings: DrawSettings) -> Tensor:
    at_once = len(rows) if device_of(logits).has_kernels else max(1, _CACHED // logits.shape[-1])
    blocks = [slice(first, first + at_once) for first in range(0, len(rows), at_once)]
    return torch.cat([_draw_block(logits[block], rows[block], settings.at(block)) for block in blocks])


def _draw_block(logits: Tensor, rows: Sequence[Sampling], settings: DrawSettings) -> Tensor:
    scores = (logits - logits.amax(dim=-1, keepdim=True)) / settings.temperature.to(logits.dtype)[:, None]
    least = settings.floor.to(scores.dtype)
    if any(row.top_k > 0 or row.top_p < 1 for row in rows):
        least = torch.maximum(least, least_likely(scores, settings))
    return win_race(scores, least, settings.keys)


def _likelihoods(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probability of one token per row, those of each row's most likely tokens, and the latter's ids."""
    logprobs = logits.log_softmax(dim=-1)
    top = logprobs.topk(min(num_top, logits.shape[-1]), dim=-1)
    return logprobs.gather(-1, token_ids[:, None]).squeeze(-1), top.values, top.indices
