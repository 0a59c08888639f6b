"""Sampling from logits. A sample depends on its request and output position, and on nothing else in the batch."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from cluster.spec.sampling import Sampled, Sampling, TokenLogprobs
from workers.device import Arriving, index_on
from workers.engine.cutoffs import keep_likeliest
from workers.engine.draw_settings import DrawSettings
from workers.engine.exponential_race import likeliest, win_race
from workers.engine.logits_processors import process
from workers.engine.sampling_state import SamplingState

_GREEDY_BELOW = 1e-5
"""Temperatures below this leave only the likeliest token, and would eventually divide by zero in fp32."""


@dataclass(frozen=True, slots=True)
class Draws:
    """Sampled tokens, one per row; on a GPU they may still be in flight."""

    token_ids: Tensor
    """``[num_rows]`` int64, where the logits are."""
    _states: Sequence[SamplingState]
    _num_top: Mapping[int, int]
    """Number of likeliest tokens to report, by row, for rows that request them."""
    _arriving: Arriving
    """Sampled tokens in transit, with log-probabilities if any row requests them."""

    @property
    def is_there(self) -> bool:
        """Return whether `wait` would not block."""
        return self._arriving.is_there

    def wait(self) -> list[Sampled]:
        """Wait for the tokens and append them to the rows' states; call once."""
        token_ids, *likelihoods = self._arriving.wait()
        reported: dict[int, TokenLogprobs] = {}
        if likelihoods:
            reported = dict(zip(self._num_top, _Likelihoods(*likelihoods).read(self._num_top.values()), strict=True))
        drawn = list(zip(self._states, token_ids.tolist(), strict=True))
        for state, token_id in drawn:
            state.append(token_id)
        return [_sampled(state, token_id, reported.get(row)) for row, (state, token_id) in enumerate(drawn)]


def sample(logits: Tensor, states: Sequence[SamplingState], positions: Sequence[int]) -> list[Sampled]:
    """Sample and wait."""
    return begin_sample(logits, states, positions).wait()


def begin_sample(logits: Tensor, states: Sequence[SamplingState], positions: Sequence[int]) -> Draws:
    """Start sampling one token per row.

    logits: [num_rows, vocab_size] fp32, as the model gives them; changed in place. positions: each row's output
    position (0 for the first generated token).
    """
    assert logits.shape[0] == len(states) == len(positions)
    asked = {index: num for index, state in enumerate(states) if (num := state.sampling.num_logprobs) is not None}
    of_asked = index_on(list(asked), logits.device) if asked else None
    unprocessed = logits[of_asked] if of_asked is not None else logits
    process(logits, states, positions)
    token_ids = draw(logits, [state.sampling for state in states], positions)
    likelihoods = _likelihoods(unprocessed, token_ids[of_asked], max(asked.values())) if of_asked is not None else ()
    # Now, since the next step may start before anybody waits for this one.
    return Draws(token_ids, states, asked, Arriving(token_ids, *likelihoods))


def _sampled(state: SamplingState, token_id: int, logprobs: TokenLogprobs | None) -> Sampled:
    if state.grammar is None:
        return Sampled(token_id=token_id, logprobs=logprobs)
    return Sampled(token_id=token_id, logprobs=logprobs, is_last=state.grammar.is_whole, problem=state.grammar.problem)


def draw(logits: Tensor, rows: Sequence[Sampling], positions: Sequence[int]) -> Tensor:
    """Sample one token id per row, ``[num_rows]`` int64.

    A temperature below 1e-5, or a top-k of 1, takes the likeliest token (the first of equals). Otherwise temperature,
    top-k, top-p and min-p apply in this order, each to what the one before left.
    """
    drawn = [index for index, row in enumerate(rows) if row.temperature >= _GREEDY_BELOW and row.top_k != 1]
    if not drawn:
        return likeliest(logits)
    random_rows = [rows[index] for index in drawn]
    settings = DrawSettings.of(
        random_rows, [positions[index] for index in drawn], drawn, logits.shape[-1], logits.device
    )
    if len(drawn) == len(rows):
        return win_race(_weights(logits, random_rows, settings), settings.keys)
    chosen = likeliest(logits)
    chosen[settings.indices] = win_race(_weights(logits[settings.indices], random_rows, settings), settings.keys)
    return chosen


class _Likelihoods(NamedTuple):
    """Log-probabilities of one token per row, and the row's likeliest tokens."""

    own: Tensor
    top: Tensor
    top_ids: Tensor

    def read(self, num_top: Iterable[int]) -> list[TokenLogprobs]:
        rows = zip(self.own.tolist(), self.top.tolist(), self.top_ids.tolist(), num_top, strict=True)
        return [TokenLogprobs(logprob=own, top_ids=ids[:num], top_logprobs=top[:num]) for own, top, ids, num in rows]


def _likelihoods(logits: Tensor, token_ids: Tensor, num_top: int) -> _Likelihoods:
    logprobs = logits.log_softmax(dim=-1)
    top = logprobs.topk(min(num_top, logits.shape[-1]), dim=-1)
    return _Likelihoods(logprobs.gather(-1, token_ids[:, None]).squeeze(-1), top.values, top.indices)


def _weights(logits: Tensor, rows: Sequence[Sampling], settings: DrawSettings) -> Tensor:
    """Return unnormalized probabilities after temperature and filters; 0 for excluded tokens."""
    scores = (logits - logits.amax(dim=-1, keepdim=True)) / settings.temperature.to(logits.dtype)[:, None]
    limited = [index for index, row in enumerate(rows) if row.top_k > 0 or row.top_p < 1]
    if len(limited) == len(rows):
        scores = keep_likeliest(scores, settings)
    elif limited:
        index = index_on(limited, scores.device)
        scores[index] = keep_likeliest(scores[index], settings.at(index))
    if any(row.min_p > 0 for row in rows):
        scores = scores.masked_fill(scores < settings.floor.to(scores.dtype)[:, None], -math.inf)
    weights: Tensor = scores.exp()
    return weights
