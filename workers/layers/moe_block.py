"""The feed-forward half of a mixture-of-experts layer: a few of many MLPs for each token."""

from torch import Tensor, nn

from workers.expert_parallel.dispatcher import make_dispatcher
from workers.expert_parallel.seats import in_order
from workers.expert_parallel.sharing import Lens
from workers.layers.cut import even_cut
from workers.layers.expert_router import ExpertRouter
from workers.layers.experts import Experts
from workers.models.config import MoeConfig
from workers.parallel.model_groups import ModelGroups


class MoeBlock(nn.Module):
    def __init__(self, hidden_size: int, moe: MoeConfig, groups: ModelGroups) -> None:
        super().__init__()
        seats = in_order(moe.num_experts, groups.parallel.ep)
        self.gate = ExpertRouter(hidden_size, moe, seats)
        inner = even_cut(moe.intermediate_size, groups.expert_width)
        self.experts = Experts(hidden_size, inner, seats, groups.position.ep, moe.names)
        self._dispatcher = make_dispatcher(groups, moe.num_chosen, seats.num_local)

    def forward(self, x: Tensor, lens: Lens, counted: Tensor | None = None) -> Tensor:
        return self._dispatcher.run(self.gate(x, counted), lens, self.experts)
