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

MIN_QUERIES, MIN_KEYS = 256, 1024
"""Below either, torch's own kernel is as fast."""

_ROWS, _KEYS = 1024, 512
"""Rows (queries times G) and keys of a block: its scores fit a cache of 1 MiB."""
_SAMPLE = 64
"""Keys from each end of what a tile sees that are looked at for its reference."""
_FAR = 2.0**32
"""A sum of weights above this, or below its inverse: the reference was so far off that weights would be coarse."""


def is_worthwhile(query: Tensor, num_keys: int) -> bool:
    """Whether ``attend_blocked`` beats torch's own kernel on queries ``[H, G, T, D]``."""
    return (
        query.device.type == "cpu"
        and query.dtype == torch.bfloat16
        and query.shape[2] >= MIN_QUERIES
        and num_keys >= MIN_KEYS
    )


def attend_blocked(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Partial | None:
    """Queries ``[H, G, T, D]`` over keys ``[H, S, D]``, all bf16; query i sees keys 0..i when causal.

    Returns out ``[H, G, T, D]`` and lse ``[H, G, T]``, or None for scores so uneven that the result would be coarse.
    """
    heads, groups, num_queries, head_dim = query.shape
    result = Partial(torch.empty_like(query), query.new_empty((heads, groups, num_queries), dtype=torch.float32))
    # One more dimension, 1 in the keys and -reference in the queries: the product itself subtracts, in fp32, before
    # a score is rounded to bf16.
    keys = key.new_ones((key.shape[1], head_dim + 1))
    buffers = _Buffers(query, groups)
    for head in range(heads):
        keys[:, :head_dim] = key[head]
        for begin in range(0, num_queries, buffers.tile_len):
            tile = slice(begin, min(begin + buffers.tile_len, num_queries))
            first_hidden = begin if causal else key.shape[1]
            out, lse = buffers.attend_tile(query[head, :, tile], keys, value[head], first_hidden)
            result.out[head, :, tile] = out
            result.lse[head, :, tile] = lse
    return None if buffers.is_coarse else result


class _Buffers:
    """Memory of one tile of queries, used for all tiles one after another."""

    def __init__(self, query: Tensor, groups: int) -> None:
        head_dim = query.shape[3]
        self.tile_len = max(_ROWS // groups, 32)
        self.is_coarse = False
        rows = groups * self.tile_len
        self._query = query.new_empty(rows * (head_dim + 1))
        self._weights = query.new_empty(rows * _KEYS)
        self._product = query.new_empty(rows, head_dim)
        self._total = query.new_empty((rows, head_dim), dtype=torch.float32)
        self._weight_sum = query.new_empty(rows, dtype=torch.float32)
        self._scale = math.log2(math.e) / math.sqrt(head_dim)
        """Scores are in units of ln 2, since exp2 is cheaper than exp."""

    def attend_tile(self, query: Tensor, keys: Tensor, value: Tensor, first_hidden: int) -> tuple[Tensor, Tensor]:
        """Queries ``[G, n, D]``; the i-th sees keys 0..first_hidden + i. Out ``[G, n, D]`` fp32, lse ``[G, n]``."""
        groups, tile_len, head_dim = query.shape
        rows = groups * tile_len
        folded = self._query[: rows * (head_dim + 1)].view(rows, head_dim + 1)
        torch.mul(query, self._scale, out=folded.view(groups, tile_len, -1)[:, :, :head_dim])
        num_seen = min(first_hidden + tile_len, len(keys))
        reference = self._reference(folded[:, :head_dim], keys[:num_seen, :head_dim], groups, first_hidden)
        folded[:, head_dim] = -reference
        total, weight_sum, product = self._total[:rows].zero_(), self._weight_sum[:rows].zero_(), self._product[:rows]
        for begin, end in _key_blocks(num_seen, first_hidden):
            weights = self._weights[: rows * (end - begin)].view(rows, end - begin)
            torch.mm(folded, keys[begin:end].t(), out=weights).exp2_()
            if end > first_hidden:
                weights.view(groups, tile_len, -1).tril_(first_hidden - begin)
            weight_sum += weights.sum(-1, dtype=torch.float32)
            total += torch.mm(weights, value[begin:end], out=product)
        lowest, highest = weight_sum.aminmax()
        self.is_coarse |= not (float(lowest) >= 1 / _FAR and float(highest) <= _FAR)
        lse = (weight_sum.log2() + reference).mul_(math.log(2.0))
        return total.div_(weight_sum[:, None]).view(groups, tile_len, head_dim), lse.view(groups, tile_len)

    def _reference(self, folded: Tensor, keys: Tensor, groups: int, first_hidden: int) -> Tensor:
        """A score near the largest of each row: the first and the latest keys hold the most weight as a rule."""
        num_common = min(first_hidden + 1, len(keys))
        first = folded @ keys[:_SAMPLE].t()
        if num_common < _SAMPLE:
            hidden = torch.ones(len(folded) // groups, first.shape[1], dtype=torch.bool).triu_(num_common)
            first.view(groups, *hidden.shape).masked_fill_(hidden, -torch.inf)
            return first.amax(-1)
        return torch.maximum(first.amax(-1), (folded @ keys[num_common - _SAMPLE : num_common].t()).amax(-1))


def _key_blocks(num_seen: int, first_hidden: int) -> list[tuple[int, int]]:
    """Ranges of keys; those that only some queries of a tile see are in a block of their own, to mask little."""
    edges = [*range(0, min(first_hidden, num_seen), _KEYS), *range(first_hidden, num_seen, _KEYS), num_seen]
    return list(pairwise(edges))
