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
