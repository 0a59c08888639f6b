"""Attention in plain torch: the reference on any device, and the CPU's path without the native library.

T: queries, S: keys, H: kv heads, G: query heads a kv head, D and V: dims of a key and of a value.
"""

from collections.abc import Sequence
from functools import cache, partial
from math import gcd

import torch
from torch import Tensor

from cluster.spec.kv import pages_for
from workers.attention.interface import GraphShape
from workers.attention.merge import Partial, empty_partial, merge
from workers.attention.params import AttentionParams
from workers.attention.pieces import Piece, paged_pieces, row_pieces
from workers.attention.runs import Run

BLOCK_KEYS = 1 << 13
MOST_SCORES = 1 << 24
"""Scores that exist at once, 64 MiB, unless one query with one block of keys has more."""


class TorchAttention:
    """Exact attention in fp32, except for prompts on a CPU that torch's own kernel supports."""

    def prepare(
        self,
        runs: Sequence[Run],
        page_tables: Sequence[Tensor],
        page_size: int,
        key_lens: Sequence[int] | None = None,
    ) -> "_PagedStep":
        return _PagedStep(runs, page_tables, page_size, key_lens)

    def prepare_rows(self, query_runs: Sequence[Run], key_runs: Sequence[Run]) -> "_Rows":
        return _Rows(query_runs, key_runs)

    def prepare_graph(self, shape: GraphShape) -> None:
        """Return None: shapes depend on the requests' lengths."""


class _PagedStep:
    """Queries over pages, copied out request by request."""

    def __init__(
        self, runs: Sequence[Run], page_tables: Sequence[Tensor], page_size: int, key_lens: Sequence[int] | None
    ) -> None:
        self._tables, self._page_size = page_tables, page_size
        self._pieces = cache(partial(paged_pieces, runs, key_lens))

    def attend(self, query: Tensor, key_pages: Tensor, value_pages: Tensor, params: AttentionParams) -> Partial:
        result = empty_partial(query, value_pages.shape[-1])
        for piece in self._pieces(params.window):
            first_page = piece.key.start // self._page_size
            pages = self._tables[piece.request][first_page : pages_for(piece.key.stop, self._page_size)]
            begin = piece.key.start - first_page * self._page_size
            keys = slice(begin, begin + piece.num_keys)
            key, value = (_gather(x, pages)[:, keys] for x in (key_pages, value_pages))
            found = attend_piece(query[piece.query], key, value, piece, params.scale)
            for whole, part in zip(result, found, strict=True):
                whole[piece.query] = part
        return result


class _Rows:
    """Queries over rows; several pieces may have the same queries."""

    def __init__(self, query_runs: Sequence[Run], key_runs: Sequence[Run]) -> None:
        self._pieces = cache(partial(row_pieces, query_runs, key_runs))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Partial:
        result = empty_partial(query, value.shape[-1])
        for piece in self._pieces(params.window):
            keys, values = (x[piece.key].transpose(0, 1) for x in (key, value))
            found = attend_piece(query[piece.query], keys, values, piece, params.scale)
            merged = merge([Partial(*(x[piece.query] for x in result)), found])
            for whole, part in zip(result, merged, strict=True):
                whole[piece.query] = part
        return result


def attend_piece(query: Tensor, key: Tensor, value: Tensor, piece: Piece, scale: float) -> Partial:
    """Compute attention of a piece's queries ``[T, heads, D]`` over its keys ``[H, S, D]`` and values ``[H, S, V]``."""
    is_triangle = piece.behind is None and piece.step == 1
    if query.device.type == "cpu" and len(query) > 1 and (piece.is_full or is_triangle) and key.shape == value.shape:
        return _by_torch(query, key, value, None if piece.is_full else piece.ahead, scale)
    # Partial sums of blocks are merged in fp32, and rounded once at the end.
    step = max(MOST_SCORES // (query.shape[1] * min(piece.num_keys, BLOCK_KEYS)), 1)
    parts = [
        _attend_queries(query[first : first + step].float() * scale, key, value, piece, first)
        for first in range(0, len(query), step)
    ]
    out, lse = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return Partial(out.to(query.dtype), lse)


def _attend_queries(query: Tensor, key: Tensor, value: Tensor, piece: Piece, first: int) -> Partial:
    """Compute attention of the queries from the piece's ``first`` on, scaled and in fp32, over blocks of keys."""
    last = first + len(query) - 1
    stop = min(piece.ahead + last * piece.step + 1, piece.num_keys)
    begin = 0 if piece.behind is None else max(piece.behind + first * piece.step, 0)
    numbers = torch.arange(first, last + 1, device=query.device)[:, None]
    partials = []
    for at in range(begin, stop, BLOCK_KEYS):
        keys = slice(at, min(at + BLOCK_KEYS, stop))
        seen = None
        if not piece.is_full:
            places = torch.arange(keys.start, keys.stop, device=query.device)
            seen = places <= piece.ahead + numbers * piece.step
            if piece.behind is not None:
                seen &= places >= piece.behind + numbers * piece.step
        partials.append(_attend_block(query, key[:, keys].float(), value[:, keys].float(), seen))
    return merge(partials)


def _attend_block(query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None) -> Partial:
    """Compute attention by definition, in fp32; ``seen [T, S]``, None for all."""
    num_queries, num_heads, head_dim = query.shape
    rows = query.view(num_queries, len(key), -1, head_dim).permute(1, 2, 0, 3).flatten(1, 2)
    scores = (rows @ key.transpose(1, 2)).view(num_heads, num_queries, -1)
    if seen is not None:
        scores.masked_fill_(~seen, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = scores.softmax(-1)
    if seen is not None:
        weights.masked_fill_((lse == -torch.inf)[..., None], 0.0)
    out = weights.view(*rows.shape[:2], -1) @ value
    return Partial(out.view(num_heads, num_queries, -1).transpose(0, 1).contiguous(), lse.T.contiguous())


def _by_torch(query: Tensor, key: Tensor, value: Tensor, ahead: int | None, scale: float) -> Partial:
    """Compute attention by torch's CPU kernel: query i sees keys 0..ahead + i, or all keys for None.

    The kernel supports triangles and rectangles only.
    """
    if ahead is None:
        return _kernel(query, key, value, scale, causal=False)
    triangle = _kernel(query, key[:, ahead:], value[:, ahead:], scale, causal=True)
    if not ahead:
        return triangle
    return merge([triangle, _kernel(query, key[:, :ahead], value[:, :ahead], scale, causal=False)])


def _kernel(query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool) -> Partial:
    num_queries, _, head_dim = query.shape
    rows = query.view(num_queries, len(key), -1, head_dim).permute(1, 2, 0, 3)
    keys, values = (x[:, None].expand(-1, rows.shape[1], -1, -1) for x in (key, value))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(rows, keys, values, 0.0, causal, scale=scale)
    return Partial(out.permute(2, 0, 1, 3).flatten(1, 2), lse.permute(2, 0, 1).flatten(1, 2))


def _gather(pages: Tensor, table: Tensor) -> Tensor:
    """Copy pages ``[page, H, slot, dim]`` to ``[H, slots, dim]``."""
    num_pages, num_heads, page_size, dim = pages.shape
    of_page, of_head, of_slot, _ = pages.stride()
    # Page and head merge into one dimension of steps that both strides are multiples of.
    step = gcd(of_page, of_head)
    num_steps = ((num_pages - 1) * of_page + (num_heads - 1) * of_head) // step + 1
    pieces = pages.as_strided((num_steps, page_size, dim), (step, of_slot, 1))
    rows = table * (of_page // step) + torch.arange(num_heads, device=table.device)[:, None] * (of_head // step)
    return pieces.index_select(0, rows.flatten()).view(num_heads, -1, dim)
