"""Exponential-race sampling by seed, output position and token id, independent of the rest of the batch."""

import hashlib
from functools import cache

import torch
from torch import Tensor

from workers.device import has_kernels

_STEP, _FIRST_FACTOR, _SECOND_FACTOR = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_FRACTION_BITS = 53
_LEAST, _MOST = 2.0**-54, 1 - 2.0**-24
"""Fractions whose exponentials are neither 0 nor infinite in fp32."""
_CACHED = 1 << 16
"""Exponentials computed at once on a CPU: they stay in its core's cache."""


def key_of(seed: int, position: int) -> int:
    """Return a signed 64-bit key that depends on the arguments alone, on every machine."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def win_race(weights: Tensor, keys: Tensor) -> Tensor:
    """Sample one token id per row, ``[num_rows]`` int64, with probability proportional to its weight.

    weights: ``[num_rows, vocab_size]`` fp32, 0 for tokens that cannot be sampled. keys: ``[num_rows]`` int64.

    Each token gets an exponential time divided by its weight, and the earliest one wins (the Gumbel-max
    trick; Maddison, Tarlow and Minka, 2014). When weights change by rounding, as after a continuation elsewhere,
    the winner changes with a probability of that order; inverse transform sampling would add this up over all
    borders between tokens.
    """
    if has_kernels(weights):
        from workers.kernels import sampling

        return sampling.win_race(weights, keys)
    return plain_race(weights, keys)


def plain_race(weights: Tensor, keys: Tensor) -> Tensor:
    """Compute `win_race` in plain torch."""
    num_rows, vocab_size = weights.shape
    at_once = max(1, _CACHED // vocab_size) if weights.device.type == "cpu" else num_rows
    blocks = [slice(first, first + at_once) for first in range(0, num_rows, at_once)]
    return torch.cat([likeliest(_earliness(weights[block], keys[block])) for block in blocks])


def _earliness(weights: Tensor, keys: Tensor) -> Tensor:
    return weights / _exponentials(keys, weights.shape[-1])


def likeliest(scores: Tensor) -> Tensor:
    """Return the first maximum of each row; on a CPU numpy is several times as fast as torch."""
    return torch.from_numpy(scores.numpy().argmax(axis=-1)) if scores.device.type == "cpu" else scores.argmax(dim=-1)


def _exponentials(keys: Tensor, vocab_size: int) -> Tensor:
    """Return ``[num_keys, vocab_size]`` fp32 exponentials of mean 1, from one SplitMix64 generator per key (Steele,
    Lea and Flood, 2014).
    """
    bits = keys[:, None] + _steps(vocab_size, keys.device)
    shifted = torch.empty_like(bits)
    bits ^= _shift(bits, 30, shifted)
    bits *= _signed(_FIRST_FACTOR)
    bits ^= _shift(bits, 27, shifted)
    bits *= _signed(_SECOND_FACTOR)
    bits ^= _shift(bits, 31, shifted)
    fractions = _shift(bits, 64 - _FRACTION_BITS, shifted).to(torch.float32) * 2.0**-_FRACTION_BITS
    return fractions.clamp_(_LEAST, _MOST).neg_().log1p_().neg_()


@cache
def _steps(vocab_size: int, device: torch.device) -> Tensor:
    return torch.arange(1, vocab_size + 1, device=device) * _signed(_STEP)


def _shift(bits: Tensor, count: int, shifted: Tensor) -> Tensor:
    """Shift right logically."""
    return torch.bitwise_right_shift(bits, count, out=shifted).bitwise_and_((1 << (64 - count)) - 1)


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits
