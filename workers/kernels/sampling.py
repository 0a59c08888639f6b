"""Cutoffs of top-k and top-p, and exponential-race sampling. The reference implementations are in workers.engine."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_CUTOFF_BLOCK = 2048
_STAGES = tl.constexpr(4)
"""Number of blocks in flight. Nothing else hides memory latency, since a row has only one program."""
_RACE_BLOCK = 4096


def find_cutoffs(scores: Tensor, top_k: Tensor, top_p: Tensor, is_sure: Tensor, cutoffs: Tensor) -> None:
    """Set ``cutoffs`` to each row's lowest score to keep, except in rows where ``is_sure`` is set.

    scores: ``[num_rows, vocab_size]`` fp32, 0 for the most likely token and negative for others. ``[num_rows]`` each:
    top_k int64, at least 1; top_p fp64; is_sure bool; cutoffs fp32.
    """
    num_rows, vocab_size = scores.shape
    _cutoff_kernel[(num_rows,)](
        scores, top_k, top_p, is_sure, cutoffs, scores.stride(0), vocab_size, BLOCK=_CUTOFF_BLOCK, num_warps=16
    )


@triton.jit(do_not_specialize_on_alignment=["top_k", "top_p"])
def _cutoff_kernel(scores, top_k, top_p, is_sure, cutoffs, stride, vocab_size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(is_sure + row) == 0:
        of_row = scores + row * stride
        num_kept = tl.minimum(tl.load(top_k + row), vocab_size)
        last = tl.full((), 0x7F800000, tl.int32)  # -inf keeps everything
        if num_kept < vocab_size:
            last = _last_with(of_row, vocab_size, num_kept.to(tl.float64), False, BLOCK)
        share = tl.load(top_p + row)
        if share < 1:
            total = _mass_above(of_row, vocab_size, last, True, BLOCK)
            if num_kept < vocab_size:
                equals = num_kept - _mass_above(of_row, vocab_size, last, False, BLOCK)
                total += equals * tl.exp(-last.to(tl.float32, bitcast=True)).to(tl.float64)
            last = tl.minimum(last, _last_with(of_row, vocab_size, share * total, True, BLOCK))
        tl.store(cutoffs + row, -_largest(of_row, vocab_size, last, BLOCK).to(tl.float32, bitcast=True))


@triton.jit
def _last_with(scores, vocab_size, limit, WEIGHED: tl.constexpr, BLOCK: tl.constexpr):
    """Return the greatest depth above which there is less mass, or fewer scores, than the limit.

    A depth is a score's distance below 0. Each pass finds two bits, and the last pass finds the lowest bit.
    """
    depth, bit = tl.full((), 0, tl.int32), tl.full((), 1 << 29, tl.int32)
    while bit > 0:
        first, second, third = _masses_above(scores, vocab_size, depth, bit, WEIGHED, BLOCK)
        num_less = (first < limit).to(tl.int32) + (second < limit).to(tl.int32) + (third < limit).to(tl.int32)
        depth += num_less * bit
        bit = bit >> 2
    mass = _mass_above(scores, vocab_size, depth | 1, WEIGHED, BLOCK)
    return tl.where(mass < limit, depth | 1, depth)


@triton.jit
def _masses_above(scores, vocab_size, depth, step, WEIGHED: tl.constexpr, BLOCK: tl.constexpr):
    """Return ``_mass_above`` for the depths one, two and three steps below ``depth``."""
    first = tl.zeros([BLOCK], dtype=tl.float64)
    second, third = first, first
    for start in tl.range(0, vocab_size, BLOCK, num_stages=_STAGES):
        depths = _depths(scores, start, vocab_size, BLOCK)
        each = _each(depths, WEIGHED)
        first += tl.where(depths < depth + step, each, 0.0).to(tl.float64)
        second += tl.where(depths < depth + 2 * step, each, 0.0).to(tl.float64)
        third += tl.where(depths < depth + 3 * step, each, 0.0).to(tl.float64)
    return tl.sum(first, 0), tl.sum(second, 0), tl.sum(third, 0)


@triton.jit
def _mass_above(scores, vocab_size, depth, WEIGHED: tl.constexpr, BLOCK: tl.constexpr):
    """Return the unnormalized mass of all scores above a depth, or their number, in fp64."""
    mass = tl.zeros([BLOCK], dtype=tl.float64)
    for start in tl.range(0, vocab_size, BLOCK, num_stages=_STAGES):
        depths = _depths(scores, start, vocab_size, BLOCK)
        mass += tl.where(depths < depth, _each(depths, WEIGHED), 0.0).to(tl.float64)
    return tl.sum(mass, 0)


@triton.jit
def _each(depths, WEIGHED: tl.constexpr):
    return tl.exp(-depths.to(tl.float32, bitcast=True)) if WEIGHED else 1.0


@triton.jit
def _largest(scores, vocab_size, depth, BLOCK: tl.constexpr):
    """Return the depth of the lowest score that is at or above ``depth``."""
    lowest = tl.zeros([BLOCK], dtype=tl.int32)
    for start in tl.range(0, vocab_size, BLOCK, num_stages=_STAGES):
        depths = _depths(scores, start, vocab_size, BLOCK)
        lowest = tl.maximum(lowest, tl.where(depths <= depth, depths, 0))
    return tl.max(lowest, 0)


@triton.jit
def _depths(scores, start, vocab_size, BLOCK: tl.constexpr):
    """Return the scores' distances below 0, as bits, which sort like integers. Padding gets the maximum."""
    token_ids = start + tl.arange(0, BLOCK)
    bits = tl.load(scores + token_ids, mask=token_ids < vocab_size, other=-float("inf")).to(tl.int32, bitcast=True)
    return tl.where(token_ids < vocab_size, bits & 0x7FFFFFFF, 0x7FFFFFFF)


_STEP = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST_FACTOR = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND_FACTOR = tl.constexpr(0x94D049BB133111EB)
_LEAST = tl.constexpr(2.0**-54)
_MOST = tl.constexpr(1 - 2.0**-24)


def win_race(weights: Tensor, keys: Tensor) -> Tensor:
    """Return the token that wins the exponential race in each row, ``[num_rows]`` int64.

    ``weights [num_rows, vocab_size]`` fp32; ``keys [num_rows]`` int64.
    """
    num_rows, vocab_size = weights.shape
    num_blocks = triton.cdiv(vocab_size, _RACE_BLOCK)
    earliest = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=weights.device)
    winners = torch.empty(num_rows, num_blocks, dtype=torch.int64, device=weights.device)
    _race_kernel[(num_rows, num_blocks)](
        weights, keys, earliest, winners, weights.stride(0), vocab_size, BLOCK=_RACE_BLOCK, num_warps=8
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
    # If all are NaN, padding may win, but the token stays in bounds.
    tl.store(winners + at, tl.minimum(block * BLOCK + tl.argmax(earliness, 0), vocab_size - 1).to(tl.int64))


@triton.jit
def _exponential(fraction):
    """Return ``-log(1 - fraction)``.

    A GPU's fast logarithm is too coarse near 1. There, the series of the inverse hyperbolic tangent is used instead.
    Its error is 1e-10 at a fraction of 1/4.
    """
    s = fraction / (2.0 - fraction)
    square = s * s
    series = 2.0 * s * (1.0 + square * (1 / 3 + square * (1 / 5 + square * (1 / 7 + square * (1 / 9)))))
    return tl.where(fraction < 0.25, series, -tl.log(1.0 - fraction))
