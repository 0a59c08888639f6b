"""Attention of many bf16 queries over many keys on a CPU, as blocks of matrix products that stay in the caches.

Torch's own CPU kernel in bf16 spends most of its time outside of the matrix products. Here G query heads that share
a kv head are rows of one product, and each score is read once: exponentials are taken against a reference fixed
before the first block, so that no block needs its own maximum and nothing accumulated is ever rescaled.

H: kv heads, G: query heads a kv head, T: queries, S: keys, D: head dim.
"""

import math
from itertools import pairwise

import torch
from torch import Tensor

from workers.context_parallel.merge import Partial
from workers.cpu import multiplies_bf16

MIN_PRODUCTS = 1 << 23
"""Multiplications of queries with keys for each kv head; below it torch's own kernel is as fast."""
MANY_KEYS = 1 << 13
"""Over so many it is slow, also for few queries."""

_ROWS, _KEYS = 1024, 1024
"""Rows (queries times G) and keys of a block. Larger ones fall out of the last cache, smaller ones wait on calls."""
_DIAGONAL = 256
"""Keys of a block that only some of a tile's queries see: what is computed in vain grows with it."""
_SAMPLE = 32
"""Keys from each end of what a tile sees that are looked at for its reference."""
_FAR = 2.0**32
"""A sum of weights above this, or below its inverse: the reference was so far off that weights would be coarse."""


def is_worthwhile(query: Tensor, num_keys: int) -> bool:
    """Whether ``attend_blocked`` beats torch's own kernel on queries ``[H, G, T, D]``."""
    is_much = query[0].numel() * num_keys >= MIN_PRODUCTS or num_keys >= MANY_KEYS
    return query.device.type == "cpu" and query.dtype == torch.bfloat16 and is_much and multiplies_bf16()


def attend_blocked(query: Tensor, key: Tensor, value: Tensor, ahead: int | None) -> Partial | None:
    """Queries ``[H, G, T, D]`` over keys ``[H, S, D]``, all bf16; query i sees keys 0..ahead + i, all of them if None.

    Returns out ``[H, G, T, D]`` and lse ``[H, G, T]``, in memory query after query, or None for scores so uneven that
    the result would be coarse.
    """
    heads, groups, num_queries, head_dim = query.shape
    out = query.new_empty((num_queries, heads, groups, head_dim))
    lse = query.new_empty((num_queries, heads, groups), dtype=torch.float32)
    # One more dimension, 1 in the keys and -reference in the queries: the product itself subtracts, in fp32, before
    # a score is rounded to bf16.
    keys = key.new_ones((key.shape[1], head_dim + 1))
    buffers = _Buffers(query, groups)
    for head in range(heads):
        keys[:, :head_dim] = key[head]
        values = value[head].contiguous()
        for begin in range(0, num_queries, buffers.tile_len):
            tile = slice(begin, min(begin + buffers.tile_len, num_queries))
            num_common = len(keys) if ahead is None else min(ahead + begin, len(keys))
            rows = query[head, :, tile].transpose(0, 1)
            out[tile, head], lse[tile, head] = buffers.attend_tile(rows, keys, values, num_common)
    return None if buffers.is_coarse else Partial(out.permute(1, 2, 0, 3), lse.permute(1, 2, 0))


class _Buffers:
    """Memory of one tile of queries, used for all tiles one after another. A tile's rows: query by query, G each."""

    def __init__(self, query: Tensor, groups: int) -> None:
        head_dim = query.shape[3]
        self.tile_len = min(max(_ROWS // groups, 32), query.shape[2])
        self.is_coarse = False
        rows = groups * self.tile_len
        self._query = query.new_empty(rows, head_dim + 1)
        self._weights = query.new_empty(rows * max(_KEYS, _DIAGONAL))
        self._product = query.new_empty(rows, head_dim)
        self._total = query.new_empty((rows, head_dim), dtype=torch.float32)
        self._weight_sum = query.new_empty(rows, dtype=torch.float32)
        self._scale = math.log2(math.e) / math.sqrt(head_dim)
        """Scores are in units of ln 2, since exp2 is cheaper than exp."""

    def attend_tile(self, query: Tensor, keys: Tensor, value: Tensor, num_common: int) -> tuple[Tensor, Tensor]:
        """Queries ``[n, G, D]``; the i-th sees keys 0..num_common + i. Out ``[n, G, D]`` fp32, lse ``[n, G]``."""
        tile_len, groups, head_dim = query.shape
        rows = groups * tile_len
        folded, product = self._query[:rows], self._product[:rows]
        torch.mul(query, self._scale, out=folded.view(tile_len, groups, -1)[..., :head_dim])
        num_seen = min(num_common + tile_len, len(keys))
        reference = self._reference(folded[:, :head_dim], keys[:num_seen, :head_dim], groups, num_common)
        folded[:, head_dim] = -reference
        total, weight_sum = self._total[:rows].zero_(), self._weight_sum[:rows].zero_()
        for begin, end in _key_blocks(num_seen, num_common):
            first = max(begin - num_common, 0) * groups
            weights = self._weights[: (rows - first) * (end - begin)].view(rows - first, end - begin)
            torch.mm(folded[first:], keys[begin:end].t(), out=weights).exp2_()
            if end > num_common:
                _clear_hidden(weights, groups)
            weight_sum[first:] += weights.sum(-1)
            total[first:] += torch.mm(weights, value[begin:end], out=product[first:])
        lowest, highest = weight_sum.aminmax()
        self.is_coarse |= not (float(lowest) >= 1 / _FAR and float(highest) <= _FAR)
        lse = (weight_sum.log2() + reference).mul_(math.log(2.0))
        return total.div_(weight_sum[:, None]).view(tile_len, groups, head_dim), lse.view(tile_len, groups)

    def _reference(self, folded: Tensor, keys: Tensor, groups: int, num_common: int) -> Tensor:
        """A score near the largest of each row: the first and the latest keys hold the most weight as a rule."""
        first = keys[:_SAMPLE] @ folded.t()
        if num_common < _SAMPLE:
            hidden = torch.ones(len(first), len(folded) // groups, dtype=torch.bool).tril_(-num_common - 1)
            first.view(*hidden.shape, groups).masked_fill_(hidden[..., None], -torch.inf)
            return first.amax(0)
        return torch.maximum(first.amax(0), (keys[num_common - _SAMPLE : num_common] @ folded.t()).amax(0))


def _clear_hidden(weights: Tensor, groups: int) -> None:
    """Zero the upper triangle of a block on the diagonal ``[n * G, keys]``, of which query i sees keys 0..i."""
    num_keys = weights.shape[1]
    weights[: groups * num_keys].view(-1, groups, num_keys).transpose(0, 1).tril_()


def _key_blocks(num_seen: int, num_common: int) -> list[tuple[int, int]]:
    """Ranges of keys; those that only some queries of a tile see are in blocks of their own."""
    return list(pairwise([*range(0, num_common, _KEYS), *range(num_common, num_seen, _DIAGONAL), num_seen]))
