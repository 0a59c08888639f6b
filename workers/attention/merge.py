"""Merge of partial attention results from ring steps, cached prefixes and split KV."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from workers.device import device_of


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


def merge(partials: Sequence[Partial], sinks: Tensor | None = None) -> Partial:
    """Join partials of the same queries over disjoint sets of keys, in any order. ``out`` keeps its dtype.

    lse = ln(sum(exp(lse_i))), out = sum(exp(lse_i - lse) * out_i). Sinks ``[heads]`` act like one more lse, with out 0.
    """
    joined = _join(partials)
    if sinks is None:
        return joined
    lse = torch.logaddexp(joined.lse, sinks)
    return Partial((joined.out * (joined.lse - lse).exp_()[..., None]).to(joined.out.dtype), lse)


def merge_in_turn(partials: Iterable[Partial]) -> Partial | None:
    """Join partials one after another in fp32, so that few exist at a time. Return a single one as it is, and None if
    there are none.
    """
    joined: Partial | None = None
    for found in partials:
        joined = found if joined is None else merge([Partial(joined.out.float(), joined.lse), found])
    return joined


def _join(partials: Sequence[Partial]) -> Partial:
    assert partials, "nothing to merge"
    if len(partials) == 1:
        return partials[0]
    if device_of(partials[0].lse).has_kernels:
        from workers.kernels.partials import merge_partials

        return Partial(*merge_partials(*zip(*partials, strict=True)))
    lse = torch.logsumexp(torch.stack([partial.lse for partial in partials]), 0)
    finite = lse.masked_fill(lse == -torch.inf, 0.0)
    first, *others = partials
    out = first.out * (first.lse - finite).exp_()[..., None]
    for other in others:
        out.addcmul_(other.out, (other.lse - finite).exp_()[..., None])
    return Partial(out.to(first.out.dtype), lse)
