"""Linear projections: each TP rank computes some of the outputs, a part of every sum, or everything."""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from workers.layers.matmul import multiply, packed
from workers.layers.shard import Shard, ShardedLayer, WeightShard, replicated


class FusedLinear(ShardedLayer):
    """Fused projections of one input: x @ weight.T + bias.

    Each rank computes its part of the outputs of every projection; they lie side by side, in order.
    """

    def __init__(self, in_size: int, outputs: Mapping[str, Shard], *, bias: bool) -> None:
        """Build the layer; `outputs` maps each projection's name ("q_proj") to this rank's part of it."""
        super().__init__()
        out_size = sum(shard.size for shard in outputs.values())
        self.weight = nn.Parameter(torch.empty(out_size, in_size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_size), requires_grad=False) if bias else None
        self._in_size, self._outputs = in_size, dict(outputs)
        self._parts: dict[tuple[int | None, int | None], Tensor] = {}
        """Packed weights of outputs that are computed separately."""

    def forward(self, x: Tensor) -> Tensor:
        return multiply(x, self.weight, self.bias)

    def project(self, x: Tensor, outputs: slice) -> Tensor:
        """Compute only some of the outputs."""
        bias = None if self.bias is None else self.bias[outputs]
        return multiply(x, self._part(outputs), bias)

    def pack(self) -> None:
        """Pack the weight after it is loaded."""
        self.weight = nn.Parameter(packed(self.weight), requires_grad=False)

    def _part(self, outputs: slice) -> Tensor:
        if not self.weight.is_mkldnn:
            return self.weight[outputs]
        bounds = outputs.start, outputs.stop
        if bounds not in self._parts:
            self._parts[bounds] = packed(self.weight.to_dense()[outputs])
        return self._parts[bounds]

    def weights(self) -> Iterator[tuple[str, WeightShard]]:
        """Yield the weight and bias of every projection."""
        sizes = [shard.size for shard in self._outputs.values()]
        for kind, fused in (("weight", self.weight), ("bias", self.bias)):
            if fused is not None:
                for (name, shard), part in zip(self._outputs.items(), torch.split(fused, sizes), strict=True):
                    shards = (shard, replicated(self._in_size)) if kind == "weight" else (shard,)
                    yield f"{name}.{kind}", WeightShard(part, shards)


class SummedLinear(ShardedLayer):
    """Linear layer whose input dimension is sharded, so that each rank computes a term of every sum."""

    def __init__(self, inputs: Shard, out_size: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_size, inputs.size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_size), requires_grad=False) if bias else None
        self._inputs = inputs

    def forward(self, x: Tensor, add_up: Callable[[Tensor], Tensor]) -> Tensor:
        """Project and add up; ``add_up`` sums the terms of all ranks."""
        out = add_up(multiply(x, self.weight))
        return out if self.bias is None else out.add_(self.bias)

    def pack(self) -> None:
        """Pack the weight after it is loaded."""
        self.weight = nn.Parameter(packed(self.weight), requires_grad=False)

    def weights(self) -> Iterator[tuple[str, WeightShard]]:
        out = replicated(len(self.weight))
        yield "weight", WeightShard(self.weight, (out, self._inputs))
        if self.bias is not None:
            yield "bias", WeightShard(self.bias, (out,))


class ReplicatedLinear(ShardedLayer):
    """Linear layer computed whole by every rank: x @ weight.T."""

    def __init__(self, in_size: int, out_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_size, in_size), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return multiply(x, self.weight)

    def weights(self) -> Iterator[tuple[str, WeightShard]]:
        yield "weight", WeightShard(self.weight, tuple(map(replicated, self.weight.shape)))
