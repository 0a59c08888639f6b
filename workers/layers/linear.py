"""Linear projections: one alone, and several of the same input as one product."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional


class Linear(nn.Module):
    """x @ weight.T + bias, over the last dimension."""

    def __init__(self, in_size: int, out_size: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_size, in_size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_size), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class FusedLinear(Linear):
    """Projections of one input that the checkpoint keeps apart, computed as one; outputs side by side, in order."""

    def __init__(self, in_size: int, out_sizes: Mapping[str, int], *, bias: bool) -> None:
        """`out_sizes` maps each part's name in the checkpoint ("q_proj") to its number of outputs."""
        super().__init__(in_size, sum(out_sizes.values()), bias=bias)
        self.out_sizes = dict(out_sizes)

    def project(self, x: Tensor, outputs: slice) -> Tensor:
        """Some of the outputs alone."""
        bias = None if self.bias is None else self.bias[outputs]
        return functional.linear(x, self.weight[outputs], bias)

    def named_parts(self) -> Iterator[tuple[str, Tensor]]:
        """Every part's weight and bias under its checkpoint name, as views into this layer's parameters."""
        names, sizes = list(self.out_sizes), list(self.out_sizes.values())
        for kind, fused in (("weight", self.weight), ("bias", self.bias)):
            if fused is not None:
                yield from (
                    (f"{name}.{kind}", part) for name, part in zip(names, torch.split(fused, sizes), strict=True)
                )
