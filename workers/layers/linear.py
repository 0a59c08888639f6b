"""Linear projections that tensor parallel ranks share: each computes some of the outputs, or a part of every sum."""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from workers.layers.cut import Cut, StoredPart, uncut
from workers.layers.matmul import multiply, packed


class FusedLinear(nn.Module):
    """x @ weight.T + bias: projections of one input that the checkpoint keeps apart, computed as one.

    Each rank computes its part of the outputs of every projection; they lie side by side, in order.
    """

    def __init__(self, in_size: int, outputs: Mapping[str, Cut], *, bias: bool) -> None:
        """`outputs` maps each projection's name in the checkpoint ("q_proj") to this rank's part of it."""
        super().__init__()
        out_size = sum(cut.size for cut in outputs.values())
        self.weight = nn.Parameter(torch.empty(out_size, in_size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_size), requires_grad=False) if bias else None
        self._in_size, self._outputs = in_size, dict(outputs)
        self._parts: dict[tuple[int | None, int | None], Tensor] = {}
        """Outputs of a packed weight that were asked for alone."""

    def forward(self, x: Tensor) -> Tensor:
        return multiply(x, self.weight, self.bias)

    def project(self, x: Tensor, outputs: slice) -> Tensor:
        """Some of the outputs alone."""
        bias = None if self.bias is None else self.bias[outputs]
        return multiply(x, self._part(outputs), bias)

    def pack(self) -> None:
        """Pack the weight, once it is filled."""
        self.weight = nn.Parameter(packed(self.weight), requires_grad=False)

    def _part(self, outputs: slice) -> Tensor:
        if not self.weight.is_mkldnn:
            return self.weight[outputs]
        bounds = outputs.start, outputs.stop
        if bounds not in self._parts:
            self._parts[bounds] = packed(self.weight.to_dense()[outputs])
        return self._parts[bounds]

    def stored_parts(self) -> Iterator[tuple[str, StoredPart]]:
        """Every projection's weight and bias under its checkpoint name."""
        sizes = [cut.size for cut in self._outputs.values()]
        for kind, fused in (("weight", self.weight), ("bias", self.bias)):
            if fused is not None:
                for (name, cut), part in zip(self._outputs.items(), torch.split(fused, sizes), strict=True):
                    cuts = (cut, uncut(self._in_size)) if kind == "weight" else (cut,)
                    yield f"{name}.{kind}", StoredPart(part, cuts)


class SummedLinear(nn.Module):
    """x @ weight.T + bias, where each rank has its part of x, over the last dimension, and so a term of every sum."""

    def __init__(self, inputs: Cut, out_size: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_size, inputs.size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_size), requires_grad=False) if bias else None
        self._inputs = inputs

    def forward(self, x: Tensor, add_up: Callable[[Tensor], Tensor]) -> Tensor:
        """``add_up`` brings the terms of all ranks together."""
        out = add_up(multiply(x, self.weight))
        return out if self.bias is None else out.add_(self.bias)

    def pack(self) -> None:
        """Pack the weight, once it is filled."""
        self.weight = nn.Parameter(packed(self.weight), requires_grad=False)

    def stored_parts(self) -> Iterator[tuple[str, StoredPart]]:
        """Weight and bias under their checkpoint names."""
        out = uncut(len(self.weight))
        yield "weight", StoredPart(self.weight, (out, self._inputs))
        if self.bias is not None:
            yield "bias", StoredPart(self.bias, (out,))
