"""The feed-forward half of a decoder layer: down(silu(gate(x)) * up(x)) (Shazeer, 2020)."""

from torch import Tensor, nn
from torch.nn import functional

from workers.expert_parallel.sharing import Lens, TokenSharing
from workers.layers.cut import even_cut
from workers.layers.linear import FusedLinear, SummedLinear
from workers.parallel.model_groups import ModelGroups
from workers.row_kernels import row_kernels


def gated(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of the halves of [num_tokens, 2 * size]."""
    if (kernels := row_kernels(gate_up)) is not None:
        return kernels.swiglu(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


class GatedMLP(nn.Module):
    """Its width is divided over the TP ranks of all DP ranks, which bring their tokens together."""

    def __init__(self, hidden_size: int, intermediate_size: int, groups: ModelGroups, *, bias: bool) -> None:
        super().__init__()
        inner = even_cut(intermediate_size, groups.dense_width)
        self.gate_up_proj = FusedLinear(hidden_size, {"gate_proj": inner, "up_proj": inner}, bias=bias)
        self.down_proj = SummedLinear(inner, hidden_size, bias=bias)
        self._sharing = TokenSharing(groups.dp, groups.dense_shards, groups.tp)

    def forward(self, x: Tensor, lens: Lens) -> Tensor:
        inner = gated(self.gate_up_proj(self._sharing.gather(x, lens)))
        out: Tensor = self.down_proj(inner, lambda terms: self._sharing.sum_home(terms, lens))
        return out
