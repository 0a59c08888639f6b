"""Puts the choices of experts in the order of their seats, all on the GPU: the host waits for no counts.

The reference is ``workers.expert_parallel.seat_order``.
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


class SeatRows(NamedTuple):
    """One row for each choice of a seat that is here."""

    tokens: Tensor
    """``[rows]`` int32: whose row each is; of rows beyond those that there are, the first one's."""
    rows: Tensor
    """``[tokens, k]`` int32: the row of each choice, -1 where its expert is elsewhere."""
    tiles: RowTiles
    """The rows of each seat, and behind them those beyond."""


def seat_rows(experts: Tensor, first: int, loads: Tensor, block_rows: int) -> SeatRows:
    """Of ``experts [tokens, k]`` int32, contiguous, those from ``first`` on; a token chooses none of them twice.

    There are as many as ``loads [seats]`` int64 counts, to which the rows of each are added. Meant for few choices:
    every seat looks at all of them.
    """
    (num_tokens, num_chosen), num_seats = experts.shape, len(loads)
    num_choices = num_tokens * num_chosen
    tokens = torch.zeros(num_choices, dtype=torch.int32, device=experts.device)
    rows = torch.empty_like(experts)
    num_tiles = min(num_choices, num_seats + 1 + num_choices // block_rows)
    tiles = torch.empty(num_tiles, TILE_FIELDS, dtype=torch.int32, device=experts.device)
    if num_choices:
        _seat_rows_kernel[(num_seats + 1,)](
            experts,
            tokens,
            rows,
            tiles,
            loads,
            first,
            num_choices,
            num_chosen,
            num_seats,
            num_tiles,
            BLOCK_ROWS=block_rows,
            NUM_BINS=block_of(num_seats + 1),
            BLOCK=_BLOCK,
        )
    return SeatRows(tokens, rows, RowTiles(tiles, block_rows))


@triton.jit(do_not_specialize=["first", "num_choices", "num_tiles"])
def _seat_rows_kernel(
    experts, tokens, rows, tiles, loads, first, num_choices, num_chosen, num_seats, num_tiles,
    BLOCK_ROWS: tl.constexpr, NUM_BINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    seat = tl.program_id(0)  # behind the last one: elsewhere
    counts = tl.zeros((NUM_BINS,), tl.int32)
    for begin in range(0, num_choices, BLOCK):
        counts += tl.histogram(_seats(experts, begin, first, num_choices, num_seats, BLOCK), NUM_BINS)
    bins = tl.arange(0, NUM_BINS)
    row = tl.sum(tl.where(bins < seat, counts, 0))
    tile = tl.sum(tl.where(bins < seat, (counts + BLOCK_ROWS - 1) // BLOCK_ROWS, 0))
    end = row + tl.sum(tl.where(bins == seat, counts, 0))
    at = row
    for begin in range(0, num_choices, BLOCK):
        choices = begin + tl.arange(0, BLOCK)
        seats = _seats(experts, begin, first, num_choices, num_seats, BLOCK)
        is_own = (seats == seat) & (choices < num_choices)
        own_rows = at + tl.cumsum(is_own.to(tl.int32)) - 1
        is_here = is_own & (seat < num_seats)
        tl.store(tokens + own_rows, choices // num_chosen, mask=is_here)
        tl.store(rows + choices, tl.where(is_here, own_rows, -1), mask=is_own)
        at += tl.sum(is_own.to(tl.int32))
    is_seat = seat < num_seats
    if is_seat:
        tl.store(loads + seat, tl.load(loads + seat) + (end - row))
    stop = tl.where(is_seat, end, num_choices)
    for part in range(0, tl.where(is_seat, (stop - row + BLOCK_ROWS - 1) // BLOCK_ROWS, num_tiles - tile)):
        own_tile = tiles + (tile + part) * _TILE_FIELDS
        tl.store(own_tile, tl.where(is_seat, seat, -1))
        tl.store(own_tile + 1, tl.minimum(row + part * BLOCK_ROWS, stop))
        tl.store(own_tile + 2, stop)


@triton.jit
def _seats(experts, begin, first, num_choices, num_seats, BLOCK: tl.constexpr):
    """Those of some choices, and of what is behind the last choice, elsewhere."""
    choices = begin + tl.arange(0, BLOCK)
    seats = tl.load(experts + choices, mask=choices < num_choices, other=-1) - first
    is_here = (seats >= 0) & (seats < num_seats) & (choices < num_choices)
    return tl.where(is_here, seats, num_seats)
