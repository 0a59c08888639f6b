"""What the parts of the torch backend share: placed runs, copies of pages, and torch's own CPU kernel."""

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.attention.plain import attend_plainly
from workers.context_parallel.merge import Partial
from workers.context_parallel.runs import Run


@dataclass(frozen=True, slots=True)
class PlacedRun:
    """A run and where its queries are."""

    run: Run
    first_row: int
    """Row of the run's first query."""


def page_rows(tables: Tensor, num_heads: int) -> Tensor:
    """Rows of pages ``tables [R, n]`` of every head in a layer's ``[page * head, slot * dim]``: ``[R, H, n]``.

    In the pool's layout page and head strides are one, and so are slots and dims, so that copies are of whole rows.
    """
    return tables[:, None] * num_heads + torch.arange(num_heads, device=tables.device)[:, None]


class _Kept(threading.local):
    """A thread's memory for copies of pages."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}


_kept = _Kept()


def gather_pages(rows: Tensor, pages: Tensor, place: int = 0) -> Tensor:
    """Copy ``rows [R, H, n]`` of one layer's ``pages [page, H, slot, D]``: ``[R, H, n * slots, D]``.

    The copy lasts until the thread's next one to the same ``place``, whose memory is kept: to get memory from the
    system anew for each layer takes as long as to fill it.
    """
    num_pages, num_heads, page_size, head_dim = pages.shape
    flat = pages.view(num_pages * num_heads, page_size * head_dim)
    out = _buffer(place, rows.numel() * flat.shape[1], flat).view(rows.numel(), -1)
    torch.index_select(flat, 0, rows.flatten(), out=out)
    return out.view(*rows.shape[:2], -1, head_dim)


def gather_key_value(rows: Tensor, key_pages: Tensor, value_pages: Tensor) -> tuple[Tensor, Tensor]:
    """Copies of both, as of ``gather_pages``."""
    return gather_pages(rows, key_pages, 0), gather_pages(rows, value_pages, 1)


def _buffer(place: int, numel: int, like: Tensor) -> Tensor:
    """Flat, and twice as large as the one before when that has become too small."""
    name = (place, like.dtype, like.device)
    kept = _kept.buffers.get(name)
    if kept is None or kept.numel() < numel:
        _kept.buffers.pop(name, None)
        # Whoever comes next may not be in the same mode.
        with torch.inference_mode(False):
            kept = _kept.buffers[name] = like.new_empty(1 << (numel - 1).bit_length())
    return kept[:numel]


def flash(query: Tensor, key: Tensor, value: Tensor, *, causal: bool = False, bias: Tensor | None = None) -> Partial:
    """Torch's kernel on ``[batch, heads, T or S, D]`` of any strides; query i sees keys 0..i when causal.

    It is for CPUs; elsewhere the same is computed without it.
    """
    if query.device.type != "cpu":
        return attend_plainly(query, key, value, causal=causal, bias=bias)
    return Partial(
        *torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, attn_mask=bias)
    )
