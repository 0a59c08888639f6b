"""Torch's attention kernel for CPUs, and copies of pages for it."""

from math import gcd

import torch
from torch import Tensor

from workers.attention.merge import Partial


def has_flash(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether the kernel supports these tensors."""
    return query.device.type == "cpu" and key.shape[-1] == value.shape[-1]


def flash(
    query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool = False, bias: Tensor | None = None
) -> Partial:
    """Compute attention of ``query [batch, heads, T, D]`` over ``[batch, heads, S, D]``, all of any strides.

    Query i sees keys 0..i when causal, otherwise all. ``bias``, which broadcasts to ``[batch, heads, T, S]``, is added
    to scores.
    """
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return Partial(*kernel(query, key, value, 0.0, causal, attn_mask=bias, scale=scale))


def gather(pages: Tensor, tables: Tensor) -> Tensor:
    """Copy pages ``[page, H, slot, dim]`` of ``tables [..., n]`` to ``[..., H, n * slots, dim]``."""
    num_pages, num_heads, page_size, dim = pages.shape
    of_page, of_head, of_slot, _ = pages.stride()
    # Page and head merge into one dimension of steps that both strides are multiples of.
    step = gcd(of_page, of_head)
    num_steps = ((num_pages - 1) * of_page + (num_heads - 1) * of_head) // step + 1
    pieces = pages.as_strided((num_steps, page_size, dim), (step, of_slot, 1))
    heads = torch.arange(num_heads, device=tables.device)[:, None] * (of_head // step)
    rows = tables[..., None, :] * (of_page // step) + heads
    return pieces.index_select(0, rows.flatten()).view(*rows.shape[:-1], -1, dim)
