"""The one merge of attention partials; ring steps, cached prefix with new tokens and split KV all join here."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from workers.kernel_devices import has_kernels


class Partial(NamedTuple):
    """Attention of some queries over some of their keys.

    A query that saw no key has out 0 and lse -inf; such rows merge without a trace and without NaN.
    """

    out: Tensor
    """``[..., heads, dim]``, normalised over the keys seen."""
    lse: Tensor
    """``[..., heads]``, fp32: natural log of the sum of exp(scaled score) over the keys seen."""


def empty_partial(query: Tensor) -> Partial:
    """The partial of queries ``[..., heads, dim]`` that saw no key."""
    lse = torch.full(query.shape[:-1], -torch.inf, dtype=torch.float32, device=query.device)
    return Partial(torch.zeros_like(query), lse)


def merge(partials: Sequence[Partial]) -> Partial:
    """Join partials of the same queries over disjoint sets of keys, in any order; out keeps its dtype.

    lse = ln(sum(exp(lse_i))), out = sum(exp(lse_i - lse) * out_i).
    """
    assert partials, "nothing to merge"
    if len(partials) == 1:
        return partials[0]
    if has_kernels(partials[0].lse):
        from workers.kernels.merge import merge_partials

        return Partial(*merge_partials(*zip(*partials, strict=True)))
    lse = torch.logsumexp(torch.stack([partial.lse for partial in partials]), 0)
    finite = lse.masked_fill(lse == -torch.inf, 0.0)
    first, *others = partials
    out = first.out * (first.lse - finite).exp_()[..., None]
    for other in others:
        out.addcmul_(other.out, (other.lse - finite).exp_()[..., None])
    return Partial(out.to(first.out.dtype), lse)
