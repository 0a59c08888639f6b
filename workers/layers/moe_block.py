"""Feed-forward half of a mixture-of-experts layer: a few of many MLPs per token, and one for all tokens."""

from torch import Tensor, nn

from workers.expert_parallel.token_dispatcher import make_dispatcher
from workers.expert_parallel.token_exchange import Lens
from workers.layers.config import MoeConfig
from workers.layers.expert_router import ExpertRouter
from workers.layers.experts import Experts
from workers.layers.gated_mlp import GatedMLP
from workers.layers.linear import ReplicatedLinear
from workers.layers.shard import even_shard
from workers.parallel.model_groups import ModelGroups


class MoeBlock(nn.Module):
    def __init__(self, hidden_size: int, moe: MoeConfig, groups: ModelGroups) -> None:
        super().__init__()
        num_local, ep_rank = moe.num_experts // groups.parallel.ep, groups.position.ep
        self.gate = ExpertRouter(hidden_size, moe)
        inner = even_shard(moe.intermediate_size, groups.expert_width)
        self.experts = Experts(hidden_size, inner, range(ep_rank * num_local, (ep_rank + 1) * num_local))
        self.shared_expert: GatedMLP | None = None
        if moe.shared_size:
            self.shared_expert = GatedMLP(hidden_size, moe.shared_size, groups, bias=False)
            self.shared_expert_gate = ReplicatedLinear(hidden_size, 1)
        self._dispatcher = make_dispatcher(groups, moe.top_k, num_local)

    def forward(self, x: Tensor, lens: Lens, counted: Tensor | None = None) -> Tensor:
        routed = self._dispatcher.run(self.gate(x, counted), lens, self.experts)
        if self.shared_expert is None:
            return routed
        shared: Tensor = self.shared_expert_gate(x).sigmoid() * self.shared_expert(x, lens)
        return routed + shared
