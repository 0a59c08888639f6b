"""The feed-forward half of a decoder layer: down(silu(gate(x)) * up(x)) (Shazeer, 2020)."""

from torch import Tensor, nn
from torch.nn import functional

from workers.layers.linear import FusedLinear, Linear


class GatedMLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool) -> None:
        super().__init__()
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = FusedLinear(hidden_size, parts, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        out: Tensor = self.down_proj(functional.silu(gate) * up)
        return out
