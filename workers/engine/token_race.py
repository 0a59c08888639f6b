"""Exponential race among a row's tokens, with which a sample depends only on its key and the likelihoods."""

import hashlib
import math
from functools import cache

import numpy as np
import torch
from torch import Tensor

from workers.device import device_of

_FRACTION_BITS = 53
_STEP, _FIRST_FACTOR, _SECOND_FACTOR = (
    bits - (1 << 64) for bits in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
"""Constants of SplitMix64 as signed 64-bit integers."""
_LEAST, _MOST = 2.0**-54, 1 - 2.0**-24
"""Smallest and largest fraction with an exponential that is neither 0 nor infinite in fp32."""


def key_of(seed: int, position: int) -> int:
    """Return a signed 64-bit key that depends only on the arguments and is the same on every machine."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def win_race(scores: Tensor, least: Tensor, keys: Tensor) -> Tensor:
    """Sample one token id per row, ``[num_rows]`` int64, with probability proportional to the exponential of its score.

    scores: ``[num_rows, vocab_size]`` fp32, at most 0. least: ``[num_rows]`` fp32, lowest score that can be sampled.
    keys: ``[num_rows]`` int64.

    Each token gets an exponential time divided by its weight, and the earliest token wins (the Gumbel-max trick;
    Maddison, Tarlow and Minka, 2014). If rounding changes the weights slightly, as after a handoff, the winner changes
    with a similarly small probability. With inverse transform sampling, the changes would add up over all tokens.
    """
    device = device_of(scores)
    if device.has_kernels:
        from workers.kernels import sampling

        return sampling.win_race(scores.masked_fill(scores < least[:, None], -math.inf).exp(), keys)
    steps = _steps(scores.shape[-1], scores.device)
    if (least == -math.inf).all():
        return device.argmax(scores.exp() / _exponentials(keys[:, None] + steps))
    return _win_among_few(scores, least, keys, steps)


def _win_among_few(scores: Tensor, least: Tensor, keys: Tensor, steps: Tensor) -> Tensor:
    """Let only the tokens race that can be sampled, on a CPU. NaN can win, so that each row has a winner."""
    racing = np.flatnonzero(~(scores.numpy() < least[:, None].numpy()))
    rows, token_ids = map(torch.from_numpy, np.divmod(racing, scores.shape[-1]))
    earliness = scores[rows, token_ids].exp() / _exponentials(keys[rows] + steps[token_ids])
    counts = torch.bincount(rows, minlength=len(scores)).tolist()
    races = zip(torch.split(earliness, counts), torch.split(token_ids, counts), strict=True)
    return torch.stack([among[each.argmax()] for each, among in races])


def _exponentials(bits: Tensor) -> Tensor:
    """Return fp32 exponentials with mean 1 for the states of SplitMix64 (Steele, Lea and Flood, 2014)."""
    shifted = torch.empty_like(bits)
    bits ^= _shift(bits, 30, shifted)
    bits *= _FIRST_FACTOR
    bits ^= _shift(bits, 27, shifted)
    bits *= _SECOND_FACTOR
    bits ^= _shift(bits, 31, shifted)
    fractions = _shift(bits, 64 - _FRACTION_BITS, shifted).to(torch.float32) * 2.0**-_FRACTION_BITS
    return fractions.clamp_(_LEAST, _MOST).neg_().log1p_().neg_()


@cache
def _steps(vocab_size: int, device: torch.device) -> Tensor:
    return torch.arange(1, vocab_size + 1, device=device) * _STEP


def _shift(bits: Tensor, count: int, shifted: Tensor) -> Tensor:
    """Shift right logically."""
    return torch.bitwise_right_shift(bits, count, out=shifted).bitwise_and_((1 << (64 - count)) - 1)
