"""The feed-forward half of a decoder layer: down(silu(gate(x)) * up(x)) (Shazeer, 2020)."""

from torch import Tensor, nn
from torch.nn import functional

from workers.layers.cut import TpGroup, even_cut
from workers.layers.linear import FusedLinear, SummedLinear


class GatedMLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int, group: TpGroup, *, bias: bool) -> None:
        super().__init__()
        inner = even_cut(intermediate_size, group)
        self.gate_up_proj = FusedLinear(hidden_size, {"gate_proj": inner, "up_proj": inner}, bias=bias)
        self.down_proj = SummedLinear(inner, hidden_size, group, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        out: Tensor = self.down_proj(functional.silu(gate) * up)
        return out
