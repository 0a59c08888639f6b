"""Chooses the experts of each token: the likeliest k of a softmax over all (Shazeer et al., 2017)."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from workers.expert_parallel.routed import NO_EXPERT, Routed
from workers.expert_parallel.seats import ExpertSeats
from workers.kernel_devices import has_kernels
from workers.layers.cut import StoredPart, uncut
from workers.layers.matmul import multiply
from workers.models.config import MoeConfig


class ExpertRouter(nn.Module):
    """Held whole by every rank. The order of computing, softmax first, is the one that checkpoints are trained with."""

    def __init__(self, hidden_size: int, moe: MoeConfig, seats: ExpertSeats) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(moe.num_experts, hidden_size), requires_grad=False)
        # A plain attribute, as rotary frequencies are: no parameter, and never cast.
        self._physical = torch.tensor(seats.physical, dtype=torch.int32, device="cpu")
        self._moe = moe

    def forward(self, hidden: Tensor, counted: Tensor | None = None) -> Routed:
        """hidden [tokens, hidden] -> the same with experts and weights; see AttentionContext for ``counted``."""
        self._physical = self._physical.to(hidden.device)  # once: each copy would wait for the GPU
        logits, moe = multiply(hidden, self.weight), self._moe
        if has_kernels(logits):
            from workers.kernels.choose_experts import choose_experts

            chosen = choose_experts(logits, moe.num_chosen, self._physical, counted, sum_to_one=moe.sum_to_one)
            return Routed(hidden, *chosen)
        likelihoods = logits.softmax(dim=-1, dtype=torch.float32)
        weights, experts = likelihoods.topk(moe.num_chosen, dim=-1)
        if moe.sum_to_one:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        physical = self._physical[experts]
        return Routed(hidden, physical if counted is None else physical.masked_fill(~counted, NO_EXPERT), weights)

    def stored_parts(self) -> Iterator[tuple[str, StoredPart]]:
        """The table under its checkpoint name."""
        yield "weight", StoredPart(self.weight, tuple(uncut(size) for size in self.weight.shape))
