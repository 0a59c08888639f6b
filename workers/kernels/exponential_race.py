"""Exponential-race sampling of one token per row, in one pass over weights; torch makes a dozen over 64-bit numbers of
each.

The reference is workers.engine.exponential_race.win_race.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096

_STEP = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST_FACTOR = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND_FACTOR = tl.constexpr(0x94D049BB133111EB)
_LEAST = tl.constexpr(2.0**-54)
_MOST = tl.constexpr(1 - 2.0**-24)


def win_race(weights: Tensor, keys: Tensor) -> Tensor:
    """Return the earliest token of each row, ``[num_rows]`` int64, for ``weights [num_rows, vocab_size]`` fp32.

    keys: ``[num_rows]`` int64.
    """
    num_rows, vocab_size = weights.shape
    num_blocks = triton.cdiv(vocab_size, _BLOCK)
    earliest = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=weights.device)
    winners = torch.empty(num_rows, num_blocks, dtype=torch.int64, device=weights.device)
    _race_kernel[(num_rows, num_blocks)](
        weights, keys, earliest, winners, weights.stride(0), vocab_size, BLOCK=_BLOCK, num_warps=8
    )
    return winners.gather(1, earliest.argmax(dim=1, keepdim=True)).squeeze(1)


@triton.jit(do_not_specialize_on_alignment=["keys"])
def _race_kernel(weights, keys, earliest, winners, stride, vocab_size, BLOCK: tl.constexpr):
    row, block, num_blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    token_ids = block * BLOCK + tl.arange(0, BLOCK)
    is_there = token_ids < vocab_size
    weight = tl.load(weights + row * stride + token_ids, mask=is_there, other=-1.0)
    bits = tl.load(keys + row).to(tl.uint64, bitcast=True) + (token_ids + 1).to(tl.uint64) * _STEP
    bits = (bits ^ (bits >> 30)) * _FIRST_FACTOR
    bits = (bits ^ (bits >> 27)) * _SECOND_FACTOR
    bits = bits ^ (bits >> 31)
    fraction = (bits >> 11).to(tl.float32) * (2.0**-53)
    fraction = tl.minimum(tl.maximum(fraction, _LEAST), _MOST)
    earliness = weight / _exponential(fraction)
    at = block + row * num_blocks
    tl.store(earliest + at, tl.max(earliness, 0))
    tl.store(winners + at, block * BLOCK + tl.argmax(earliness, 0).to(tl.int64))


@triton.jit
def _exponential(fraction):
    """Return ``-log(1 - fraction)``. A GPU's fast logarithm is too coarse near 1, where a series is used (of the
    inverse hyperbolic tangent; its error is 1e-10 at a quarter).
    """
    s = fraction / (2.0 - fraction)
    square = s * s
    series = 2.0 * s * (1.0 + square * (1 / 3 + square * (1 / 5 + square * (1 / 7 + square * (1 / 9)))))
    return tl.where(fraction < 0.25, series, -tl.log(1.0 - fraction))
