"""Tokens with the experts chosen for them, as they travel between ranks."""

from typing import NamedTuple

import torch
from torch import Tensor

NO_EXPERT = -1
"""Fills up the choices of a token that asks for fewer experts than others."""


class RoutedTokens(NamedTuple):
    """Any number of tokens, none included; k experts each."""

    hidden: Tensor
    """``[tokens, hidden]``."""
    experts: Tensor
    """``[tokens, k]`` int32, numbers of experts, or NO_EXPERT."""
    weights: Tensor
    """``[tokens, k]`` fp32."""

    def packed(self) -> Tensor:
        """Return one row of bytes per token, so that one collective moves everything."""
        return torch.cat([_bytes_of(part) for part in self], dim=1)

    def unpack(self, rows: Tensor) -> "RoutedTokens":
        """Return tokens of this shape that others packed."""
        widths = [part.shape[1] * part.element_size() for part in self]
        hidden, experts, weights = (
            columns.contiguous().view(part.dtype)
            for columns, part in zip(torch.split(rows, widths, dim=1), self, strict=True)
        )
        return RoutedTokens(hidden, experts, weights)


def _bytes_of(part: Tensor) -> Tensor:
    return part.contiguous().view(torch.uint8)


def order_by_expert(experts: Tensor, first: int, num_local: int) -> tuple[Tensor, list[int]]:
    """Sort the choices of local experts, ``first`` and the next ``num_local - 1``, by expert and then by token.

    Returns their indices in ``experts [tokens, k]``, flattened, and how many each expert has. On a GPU the host waits
    for the counts.
    """
    local = experts.flatten().long() - first
    local[(local < 0) | (local >= num_local)] = num_local
    counts = local.bincount(minlength=num_local + 1).tolist()[:num_local]
    return local.argsort(stable=True)[: sum(counts)], counts
