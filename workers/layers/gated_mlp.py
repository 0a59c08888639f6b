"""Feed-forward half of a decoder layer: down(silu(gate(x)) * up(x)) (Shazeer, 2020)."""

from torch import Tensor, nn
from torch.nn import functional

from workers.expert_parallel.token_exchange import Lens, TokenExchange
from workers.kernels.elementwise import elementwise_kernels
from workers.layers.linear import FusedLinear, SummedLinear
from workers.layers.shard import even_shard
from workers.parallel.model_groups import ModelGroups


def gated(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up of the halves of [num_tokens, 2 * size]."""
    if (kernels := elementwise_kernels(gate_up)) is not None:
        return kernels.swiglu(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


class GatedMLP(nn.Module):
    """Gated MLP whose width the TP ranks of all DP ranks share; they gather their tokens."""

    def __init__(self, hidden_size: int, intermediate_size: int, groups: ModelGroups, *, bias: bool) -> None:
        super().__init__()
        inner = even_shard(intermediate_size, groups.dense_width)
        self.gate_up_proj = FusedLinear(hidden_size, {"gate_proj": inner, "up_proj": inner}, bias=bias)
        self.down_proj = SummedLinear(inner, hidden_size, bias=bias)
        self._exchange = TokenExchange(groups.dp, groups.dense_shards, groups.tp)

    def forward(self, x: Tensor, lens: Lens) -> Tensor:
        inner = gated(self.gate_up_proj(self._exchange.gather(x, lens)))
        out: Tensor = self.down_proj(inner, lambda terms: self._exchange.scatter_sums(terms, lens))
        return out
