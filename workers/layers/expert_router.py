"""Choice of each token's experts: the top k of a softmax over all (Shazeer et al., 2017)."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from workers.device import has_kernels
from workers.expert_parallel.routed_tokens import NO_EXPERT, RoutedTokens
from workers.layers.config import MoeConfig
from workers.layers.matmul import multiply
from workers.layers.shard import ShardedLayer, WeightShard, replicated


class ExpertRouter(ShardedLayer):
    """Router table that every rank holds whole. Softmax comes before top k, as in the training of checkpoints."""

    def __init__(self, hidden_size: int, moe: MoeConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(moe.num_experts, hidden_size), requires_grad=False)
        self._moe = moe

    def forward(self, hidden: Tensor, counted: Tensor | None = None) -> RoutedTokens:
        """Route hidden [tokens, hidden]; see AttentionContext for ``counted``."""
        logits, moe = multiply(hidden, self.weight), self._moe
        if has_kernels(logits):
            from workers.kernels.choose_experts import choose_experts

            chosen = choose_experts(logits, moe.top_k, counted, sum_to_one=moe.renormalize)
            return RoutedTokens(hidden, *chosen)
        likelihoods = logits.softmax(dim=-1, dtype=torch.float32)
        weights, experts = likelihoods.topk(moe.top_k, dim=-1)
        if moe.renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        experts = experts.to(torch.int32)
        return RoutedTokens(hidden, experts if counted is None else experts.masked_fill(~counted, NO_EXPERT), weights)

    def weights(self) -> Iterator[tuple[str, WeightShard]]:
        yield "weight", WeightShard(self.weight, tuple(map(replicated, self.weight.shape)))
