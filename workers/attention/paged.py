"""What the parts of the torch backend share: placed runs, copies of pages, and torch's own CPU kernel."""

from dataclasses import dataclass

import torch
from torch import Tensor

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
    return tables[:, None] * num_heads + torch.arange(num_heads)[:, None]


def gather_pages(rows: Tensor, pages: Tensor, buffer: Tensor | None = None) -> Tensor:
    """Copy ``rows [R, H, n]`` of one layer's ``pages [page, H, slot, D]``: ``[R, H, n * slots, D]``.

    Into the beginning of the flat ``buffer``, if there is one.
    """
    num_pages, num_heads, page_size, head_dim = pages.shape
    flat = pages.view(num_pages * num_heads, page_size * head_dim)
    if buffer is None:
        copied = flat.index_select(0, rows.flatten())
    else:
        out = buffer[: rows.numel() * flat.shape[1]].view(rows.numel(), -1)
        copied = torch.index_select(flat, 0, rows.flatten(), out=out)
    return copied.view(*rows.shape[:2], -1, head_dim)


def flash(query: Tensor, key: Tensor, value: Tensor, *, causal: bool = False, bias: Tensor | None = None) -> Partial:
    """Torch's kernel on ``[batch, heads, T or S, D]`` of any strides; query i sees keys 0..i when causal."""
    return Partial(
        *torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, attn_mask=bias)
    )
