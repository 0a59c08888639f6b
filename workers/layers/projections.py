"""Query and output projections of attention, which every rank stores, or which CP ranks store together.

CP ranks compute different tokens with the same projections. With `prefill.shard_linear`, each stores only some of a
stage's projections, or some rows of all, and they are sent to all ranks ahead of use while other work runs. Weights
travel in the order of their use, without a break between steps: during a step's last layers, the first layers' weights
are sent for the next step. Every rank calls every layer once per step, even without tokens, so all ranks start the same
transfers in the same order.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import cycle
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cluster.spec.linear_shards import LinearShards
from cluster.spec.strategy import ShardLinear
from workers.layers.linear import FusedLinear, SummedLinear
from workers.layers.matmul import multiply
from workers.layers.shard import Shard, ShardedLayer, WeightShard, replicated
from workers.parallel.communicator import Communicator, Pending
from workers.parallel.model_groups import ModelGroups

_PER_LAYER = 2
"""Number of projections in a layer: of queries, and of attention's output."""


class BufferRing(nn.Module):
    """Buffers for the weights of one projection, which serve one layer after another."""

    def __init__(self, num_buffers: int, num_rows: int, num_columns: int) -> None:
        super().__init__()
        self.memory = nn.Parameter(torch.empty(num_buffers, num_rows, num_columns), requires_grad=False)
        self._turns = cycle(range(num_buffers))

    def next(self) -> Tensor:
        """Return the buffer that has been in use for longest."""
        return self.memory[next(self._turns)]


class Transfer(NamedTuple):
    """Weight on its way to this rank."""

    linear: "CpLinear"
    weight: Tensor
    pending: Pending


class WeightExchange:
    """Transfers of the weights of one stage between its CP ranks."""

    def __init__(self, shards: LinearShards, group: Communicator) -> None:
        self.shards, self.group = shards, group
        self._linears: list[CpLinear] = []
        self._flying: deque[Transfer] = deque()
        self._num_started = 0

    def add(self, linear: "CpLinear") -> None:
        """Add a projection, in the order of use."""
        self._linears.append(linear)

    def take(self, linear: "CpLinear") -> Tensor:
        """Wait for a weight and return it, ``[outputs, inputs]``. Start the transfer of the same projection's weight
        that is used ``ahead`` layers later.

        Every rank calls this for all projections in the order of their use. The result is valid until the same
        projection of the next layer is taken. A rank that measures its own work gets any values.
        """
        if self.group.size == 1:
            return linear.ring.memory[0, : linear.num_rows]
        while len(self._flying) <= _PER_LAYER * self.shards.ahead:
            self._flying.append(self._start())
        arriving = self._flying.popleft()
        assert arriving.linear is linear, "projections are taken in another order than they were added in"
        arriving.pending.wait()
        return arriving.weight

    def _start(self) -> Transfer:
        linear = self._linears[self._num_started % len(self._linears)]
        self._num_started += 1
        buffer = linear.ring.next()
        if self.shards.way is ShardLinear.GATHER:
            return Transfer(linear, buffer[: linear.num_rows], self.group.start_all_gather(buffer, linear.stored))
        weight = linear.stored if linear.owner == self.group.rank else buffer
        return Transfer(linear, weight, self.group.start_broadcast(weight, linear.owner))


class CpLinear(ShardedLayer):
    """Projection whose weight the CP ranks store together. Each holds the whole bias of its TP shard."""

    def __init__(
        self,
        exchange: WeightExchange,
        ring: BufferRing,
        layer: int,
        outputs: Shard,
        inputs: Shard,
        *,
        bias: bool,
        name: str = "",
    ) -> None:
        """Build the layer. ``layer`` is its index in the pipeline stage, and ``name`` is that of one of several
        projections in a module.
        """
        super().__init__()
        self.ring, self.num_rows, self.owner = ring, outputs.size, exchange.shards.owner(layer)
        rows = exchange.shards.stored_rows(outputs.size, layer, exchange.group.rank)
        self.stored = nn.Parameter(torch.empty(len(rows), inputs.size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outputs.size), requires_grad=False) if bias else None
        self._exchange, self._prefix = exchange, f"{name}." if name else ""
        self._outputs, self._inputs = outputs, inputs
        self._stored_outputs = Shard(outputs.whole, outputs.start + rows.start, len(rows))
        exchange.add(self)

    def forward(self, x: Tensor, add_up: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Project ``x``. If the inputs are sharded, ``add_up`` sums the terms of all TP ranks."""
        weight = self._exchange.take(self)
        if add_up is None:
            return multiply(x, weight, self.bias)
        out = add_up(multiply(x, weight))
        return out if self.bias is None else out.add_(self.bias)

    def weights(self) -> Iterator[tuple[str, WeightShard]]:
        if len(self.stored):
            yield f"{self._prefix}weight", WeightShard(self.stored, (self._stored_outputs, self._inputs))
        if self.bias is not None:
            yield f"{self._prefix}bias", WeightShard(self.bias, (self._outputs,))


class SplitLinear(nn.Module):
    """Replacement of a ``FusedLinear`` that computes its first projection, whose weight CP ranks store together, apart
    from the rest.
    """

    def __init__(self, first: CpLinear, rest: FusedLinear | None) -> None:
        super().__init__()
        self.first, self.rest = first, rest

    def forward(self, x: Tensor) -> Tensor:
        first: Tensor = self.first(x)
        return first if self.rest is None else torch.cat((first, self.rest(x)), dim=-1)

    def project(self, x: Tensor, outputs: slice) -> Tensor:
        """Compute either the first projection or all others."""
        linear = self.first if outputs == slice(self.first.num_rows) else self.rest
        assert linear is self.first or outputs == slice(self.first.num_rows, None), f"{outputs} is neither part"
        assert linear is not None, "there is only one projection"
        out: Tensor = linear(x)
        return out


class Projections:
    """Maker of query and output projections in layers whose projections every rank stores."""

    def queries(
        self,
        layer: int,  # noqa: ARG002
        in_size: int,
        outputs: Mapping[str, Shard],
        *,
        bias: bool,
    ) -> FusedLinear | SplitLinear:
        """Return the projection of queries, which is the first of ``outputs``, and all others of the same input.

        ``layer`` is the index in the pipeline stage. ``outputs`` maps names to this rank's shards of the outputs.
        """
        return FusedLinear(in_size, outputs, bias=bias)

    def output(
        self,
        layer: int,  # noqa: ARG002
        inputs: Shard,
        out_size: int,
        *,
        bias: bool,
    ) -> SummedLinear | CpLinear:
        """Return the output projection of ``inputs``, which the layer with this index uses after its queries."""
        return SummedLinear(inputs, out_size, bias=bias)


class CpProjections(Projections):
    """Maker of projections that the CP ranks of a stage store together. All layers must have the same shapes.

    Call its methods in the order in which the layers use the projections.
    """

    def __init__(self, shards: LinearShards, group: Communicator) -> None:
        self._exchange = WeightExchange(shards, group)
        self._rings: dict[str, BufferRing] = {}

    def queries(self, layer: int, in_size: int, outputs: Mapping[str, Shard], *, bias: bool) -> SplitLinear:
        (name, shard), *others = outputs.items()
        ring = self._ring("queries", shard.size, in_size)
        first = CpLinear(self._exchange, ring, layer, shard, replicated(in_size), bias=bias, name=name)
        return SplitLinear(first, FusedLinear(in_size, dict(others), bias=bias) if others else None)

    def output(self, layer: int, inputs: Shard, out_size: int, *, bias: bool) -> CpLinear:
        ring = self._ring("output", out_size, inputs.size)
        return CpLinear(self._exchange, ring, layer, replicated(out_size), inputs, bias=bias)

    def _ring(self, kind: str, num_rows: int, num_columns: int) -> BufferRing:
        shards = self._exchange.shards
        if kind not in self._rings:
            self._rings[kind] = BufferRing(shards.num_buffers, shards.buffer_rows(num_rows), num_columns)
        ring = self._rings[kind]
        assert ring.memory.shape[1:] == (shards.buffer_rows(num_rows), num_columns), "layers differ in their shapes"
        return ring


def make_projections(groups: ModelGroups) -> Projections:
    """Return the maker of a stage's projections."""
    return Projections() if groups.linear_shards is None else CpProjections(groups.linear_shards, groups.projections)
