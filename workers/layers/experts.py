"""Experts of one rank: gated MLPs side by side, each multiplied with all of its tokens at once."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from workers.device import has_kernels, index_on
from workers.expert_parallel.expert_order import order_by_expert
from workers.expert_parallel.routed_tokens import RoutedTokens
from workers.layers.gated_mlp import gated
from workers.layers.matmul import multiply
from workers.layers.shard import Shard, ShardedLayer, WeightShard, replicated

FEW_CHOICES = 32_768
"""Most choices for which all get rows, wherever their experts are, so that the host waits for no counts: 128 MiB for
hidden states of 2,048.
"""


class Experts(ShardedLayer):
    """Experts of one EP rank, an equal run of all, with a part of each one's width."""

    def __init__(self, hidden_size: int, inner: Shard, numbers: range) -> None:
        super().__init__()
        num_local = len(numbers)
        self.gate_up = nn.Parameter(torch.empty(num_local, 2 * inner.size, hidden_size), requires_grad=False)
        self.down = nn.Parameter(torch.empty(num_local, hidden_size, inner.size), requires_grad=False)
        self.loads = torch.zeros(num_local, dtype=torch.int64, device="cpu")
        """Tokens that each expert has computed since the start; on its device from the first step on."""
        self.numbers = numbers
        """Numbers of these experts in the model."""
        self._inner = inner

    def forward(self, routed: RoutedTokens) -> Tensor:
        """Return what these experts add to each token, weighted: ``[tokens, hidden]``."""
        self.loads = self.loads.to(routed.hidden.device)  # once: each copy would wait for the GPU
        if has_kernels(routed.hidden):
            return self._grouped(routed)
        order, counts = self._counted(routed.experts)
        tokens, weights = order // routed.experts.shape[1], routed.weights.flatten()[order]
        out = torch.zeros(routed.hidden.shape, dtype=torch.float32, device=routed.hidden.device)
        for expert, (mine, weight) in enumerate(
            zip(torch.split(tokens, counts), torch.split(weights, counts), strict=True)
        ):
            if len(mine):
                inner = gated(multiply(routed.hidden[mine], self.gate_up[expert]))
                answer = multiply(inner, self.down[expert])
                out.index_add_(0, mine, answer.float() * weight[:, None])
        return out.to(routed.hidden.dtype)

    def _grouped(self, routed: RoutedTokens) -> Tensor:
        """Compute all experts at once."""
        from workers.kernels.expert_rows import ExpertRows, expert_rows
        from workers.kernels.grouped_matmul import block_rows_for, grouped_matmul, tiles_of
        from workers.kernels.sum_choices import sum_choices

        hidden, experts = routed.hidden, routed.experts
        if experts.numel() <= FEW_CHOICES:
            block_rows = block_rows_for(experts.numel(), len(self.loads), hidden.itemsize)
            sorted_rows = expert_rows(experts, self.numbers.start, self.loads, block_rows)
        else:
            order, counts = self._counted(experts)
            rows = torch.full_like(experts, -1)
            rows.view(-1)[order] = torch.arange(len(order), dtype=rows.dtype, device=rows.device)
            tokens = (order // experts.shape[1]).to(torch.int32)
            sorted_rows = ExpertRows(tokens, rows, tiles_of(counts, hidden.itemsize, hidden.device))
        inner = gated(grouped_matmul(hidden, self.gate_up, sorted_rows.tiles, sorted_rows.tokens))
        return sum_choices(grouped_matmul(inner, self.down, sorted_rows.tiles), sorted_rows.rows, routed.weights)

    def _counted(self, experts: Tensor) -> tuple[Tensor, list[int]]:
        """Count tokens on each expert; see ``order_by_expert``."""
        order, counts = order_by_expert(experts, self.numbers.start, len(self.loads))
        self.loads += index_on(counts, self.loads.device)
        return order, counts

    def weights(self) -> Iterator[tuple[str, WeightShard]]:
        """Yield the projections of every expert, by its number."""
        hidden = replicated(self.gate_up.shape[2])
        for index, expert in enumerate(self.numbers):
            gate, up = self.gate_up[index].chunk(2)
            yield f"{expert}.gate_proj.weight", WeightShard(gate, (self._inner, hidden))
            yield f"{expert}.up_proj.weight", WeightShard(up, (self._inner, hidden))
            yield f"{expert}.down_proj.weight", WeightShard(self.down[index], (hidden, self._inner))
