"""Attention of queries over the keys of one request, which lie at hand: the choice of a kernel.

H: kv heads, G: query heads a kv head, T: queries, S: keys, D: head dim.
"""

from torch import Tensor

from workers.attention.blocked import attend_blocked, is_worthwhile
from workers.attention.paged import flash
from workers.context_parallel.merge import Partial, merge


def extend(query: Tensor, key: Tensor, value: Tensor, ahead: int | None) -> Partial:
    """Queries ``[T, heads, D]`` over keys ``[H, S, D]`` of any strides; query i sees keys 0..ahead + i, or all.

    ``ahead`` is at least 0 and below S. Out is ``[T, heads, D]`` in the query's dtype.
    """
    split = query.view(len(query), len(key), -1, query.shape[2]).permute(1, 2, 0, 3)
    partial = attend_blocked(split, key, value, ahead) if is_worthwhile(split, key.shape[1]) else None
    out, lse = partial or _attend_flash(split, key, value, ahead)
    return Partial(out.permute(2, 0, 1, 3).flatten(1, 2), lse.permute(2, 0, 1).flatten(1, 2))


def _attend_flash(query: Tensor, key: Tensor, value: Tensor, ahead: int | None) -> Partial:
    """Queries ``[H, G, T, D]``; torch's kernel knows triangles and rectangles only."""
    key, value = (x[:, None].expand(-1, query.shape[1], -1, -1) for x in (key, value))
    if ahead is None:
        return flash(query, key, value)
    triangle = flash(query, key[:, :, ahead:], value[:, :, ahead:], causal=True)
    return merge([triangle, flash(query, key[:, :, :ahead], value[:, :, :ahead])]) if ahead else triangle
