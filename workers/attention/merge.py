"""Merge of partial attention results from ring steps, cached prefixes and split KV."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from workers.device import device_of

_ROWS_AT_ONCE = 512
"""Number of rows whose fp32 copies exist at a time on a CPU."""


class Partial(NamedTuple):
    """Attention of some queries over some of their keys.

    A query that saw no key has out 0 and lse -inf. Merging such rows changes nothing and yields no NaN.
    """

    out: Tensor
    """``[..., heads, dim]``, normalized over the keys seen."""
    lse: Tensor
    """``[..., heads]``, fp32: natural log of the sum of exp(scaled score) over the keys seen."""


def empty_partial(query: Tensor, value_dim: int | None = None) -> Partial:
    """Return the partial of queries ``[..., heads, dim]`` that saw no key. By default, values are as wide as keys."""
    shape = query.shape[:-1]
    out = query.new_zeros(*shape, query.shape[-1] if value_dim is None else value_dim)
    return Partial(out, query.new_full(shape, -torch.inf, dtype=torch.float32))


def unwritten_partial(query: Tensor, value_dim: int) -> Partial:
    """Allocate the partial of queries ``[..., heads, dim]`` without writing to it."""
    shape = query.shape[:-1]
    return Partial(query.new_empty(*shape, value_dim), query.new_empty(shape, dtype=torch.float32))


def merge_in_turn(partials: Iterable[Partial]) -> Partial | None:
    """Join partials of the same queries over disjoint sets of keys, in any order, one after another in fp32.

    Return a single one as it is, and None if there are none. The result may overwrite the first one.
    """
    joined: Partial | None = None
    for found in partials:
        if joined is None:
            joined = found
        else:
            joined = Partial(joined.out.float().contiguous(), joined.lse.contiguous())
            merge_into(joined, found)
        del found  # or it would exist together with the next one
    return joined


def merge_into(joined: Partial, found: Partial) -> None:
    """Add a partial over other keys to ``joined``, in place.

    lse = ln(exp(lse_1) + exp(lse_2)), out = exp(lse_1 - lse) * out_1 + exp(lse_2 - lse) * out_2.
    """
    if device_of(joined.lse).has_kernels:
        from workers.kernels.partials import merge_partial

        merge_partial(*joined, *found)
        return
    lse = torch.logaddexp(joined.lse, found.lse)
    finite = lse.masked_fill(lse == -torch.inf, 0.0)
    factors = ((each.lse - finite).exp_()[..., None] for each in (joined, found))
    rows = (torch.split(x, _ROWS_AT_ONCE) for x in (joined.out, found.out, *factors))
    for out, other, factor, other_factor in zip(*rows, strict=True):
        out.mul_(factor).addcmul_(other, other_factor)
    joined.lse.copy_(lse)


def with_sinks(found: Partial, sinks: Tensor | None) -> Partial:
    """Return the partial with sinks ``[heads]``, each of which acts like one more score of a key without a value."""
    if sinks is None:
        return found
    lse = torch.logaddexp(found.lse, sinks)
    return Partial((found.out * (found.lse - lse).exp_()[..., None]).to(found.out.dtype), lse)
