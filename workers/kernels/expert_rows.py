"""Sorting of expert choices by expert, all on the GPU: the host waits for no counts.

The reference is ``workers.expert_parallel.routed_tokens``.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.kernels.grouped_matmul import TILE_FIELDS, RowTiles
from workers.kernels.launch import block_of

_BLOCK = 512
_TILE_FIELDS = tl.constexpr(TILE_FIELDS)


class ExpertRows(NamedTuple):
    """One row for each choice of a local expert."""

    tokens: Tensor
    """Token of each row, ``[rows]`` int32; the first token for rows beyond the last choice."""
    rows: Tensor
    """Row of each choice, ``[tokens, k]`` int32; -1 where its expert is elsewhere."""
    tiles: RowTiles
    """Rows of each expert, and behind them the unused ones."""


def expert_rows(experts: Tensor, first: int, loads: Tensor, block_rows: int) -> ExpertRows:
    """Sort the choices ``experts [tokens, k]`` int32, contiguous, of local experts: those from ``first`` on.

    ``loads [local experts]`` int64 counts are increased by the rows of each. A token chooses no
    expert twice. Meant for few choices: every expert looks at all of them.
    """
    (num_tokens, num_chosen), num_local = experts.shape, len(loads)
    num_choices = num_tokens * num_chosen
    tokens = torch.zeros(num_choices, dtype=torch.int32, device=experts.device)
    rows = torch.empty_like(experts)
    num_tiles = min(num_choices, num_local + 1 + num_choices // block_rows)
    tiles = torch.empty(num_tiles, TILE_FIELDS, dtype=torch.int32, device=experts.device)
    if num_choices:
        _expert_rows_kernel[(num_local + 1,)](
            experts,
            tokens,
            rows,
            tiles,
            loads,
            first,
            num_choices,
            num_chosen,
            num_local,
            num_tiles,
            BLOCK_ROWS=block_rows,
            NUM_BINS=block_of(num_local + 1),
            BLOCK=_BLOCK,
        )
    return ExpertRows(tokens, rows, RowTiles(tiles, block_rows))


@triton.jit(do_not_specialize=["first", "num_choices", "num_tiles"])
def _expert_rows_kernel(
    experts, tokens, rows, tiles, loads, first, num_choices, num_chosen, num_local, num_tiles,
    BLOCK_ROWS: tl.constexpr, NUM_BINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)  # behind the last one: elsewhere
    counts = tl.zeros((NUM_BINS,), tl.int32)
    for begin in range(0, num_choices, BLOCK):
        counts += tl.histogram(_local(experts, begin, first, num_choices, num_local, BLOCK), NUM_BINS)
    bins = tl.arange(0, NUM_BINS)
    row = tl.sum(tl.where(bins < expert, counts, 0))
    tile = tl.sum(tl.where(bins < expert, (counts + BLOCK_ROWS - 1) // BLOCK_ROWS, 0))
    end = row + tl.sum(tl.where(bins == expert, counts, 0))
    at = row
    for begin in range(0, num_choices, BLOCK):
        choices = begin + tl.arange(0, BLOCK)
        local = _local(experts, begin, first, num_choices, num_local, BLOCK)
        is_own = (local == expert) & (choices < num_choices)
        own_rows = at + tl.cumsum(is_own.to(tl.int32)) - 1
        is_here = is_own & (expert < num_local)
        tl.store(tokens + own_rows, choices // num_chosen, mask=is_here)
        tl.store(rows + choices, tl.where(is_here, own_rows, -1), mask=is_own)
        at += tl.sum(is_own.to(tl.int32))
    is_local = expert < num_local
    if is_local:
        tl.store(loads + expert, tl.load(loads + expert) + (end - row))
    stop = tl.where(is_local, end, num_choices)
    for part in range(0, tl.where(is_local, (stop - row + BLOCK_ROWS - 1) // BLOCK_ROWS, num_tiles - tile)):
        own_tile = tiles + (tile + part) * _TILE_FIELDS
        tl.store(own_tile, tl.where(is_local, expert, -1))
        tl.store(own_tile + 1, tl.minimum(row + part * BLOCK_ROWS, stop))
        tl.store(own_tile + 2, stop)


@triton.jit
def _local(experts, begin, first, num_choices, num_local, BLOCK: tl.constexpr):
    """Number the local experts of some choices; all others count as elsewhere."""
    choices = begin + tl.arange(0, BLOCK)
    local = tl.load(experts + choices, mask=choices < num_choices, other=-1) - first
    is_here = (local >= 0) & (local < num_local) & (choices < num_choices)
    return tl.where(is_here, local, num_local)
