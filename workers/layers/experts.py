"""The experts of one rank: gated MLPs side by side, each multiplied with all of its tokens at once."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from workers.expert_parallel.routed import Routed
from workers.expert_parallel.seats import ExpertSeats
from workers.kernel_devices import has_kernels
from workers.layers.cut import Cut, StoredPart, uncut
from workers.layers.gated_mlp import gated
from workers.layers.matmul import multiply
from workers.models.config import ExpertNames


class Experts(nn.Module):
    """Those in the seats of one EP rank, with a part of each one's width."""

    def __init__(self, hidden_size: int, inner: Cut, seats: ExpertSeats, ep_rank: int, names: ExpertNames) -> None:
        super().__init__()
        num_local = seats.num_local
        self.gate_up = nn.Parameter(torch.empty(num_local, 2 * inner.size, hidden_size), requires_grad=False)
        self.down = nn.Parameter(torch.empty(num_local, hidden_size, inner.size), requires_grad=False)
        self.loads = [0] * num_local
        """Tokens that each seat has computed since the start."""
        self.held: Sequence[int] = seats.held(ep_rank)
        """The logical expert at each seat."""
        self._first = ep_rank * num_local
        self._inner, self._names = inner, names

    def forward(self, routed: Routed) -> Tensor:
        """What these experts add, weighted, for each token: ``[tokens, hidden]``."""
        chosen_seats = routed.experts.long() - self._first
        tokens, choices = ((chosen_seats >= 0) & (chosen_seats < len(self.loads))).nonzero(as_tuple=True)
        chosen = chosen_seats[tokens, choices]
        order = chosen.argsort(stable=True)
        tokens, weights = tokens[order], routed.weights[tokens, choices][order]
        counts = chosen.bincount(minlength=len(self.loads)).tolist()
        self.loads = [load + count for load, count in zip(self.loads, counts, strict=True)]
        if has_kernels(routed.hidden):
            return self._grouped(routed.hidden, tokens, weights, counts)
        out = torch.zeros(routed.hidden.shape, dtype=torch.float32, device=routed.hidden.device)
        for seat, (mine, weight) in enumerate(
            zip(torch.split(tokens, counts), torch.split(weights, counts), strict=True)
        ):
            if len(mine):
                inner = gated(multiply(routed.hidden[mine], self.gate_up[seat]))
                answer = multiply(inner, self.down[seat])
                out.index_add_(0, mine, answer.float() * weight[:, None])
        return out.to(routed.hidden.dtype)

    def _grouped(self, hidden: Tensor, tokens: Tensor, weights: Tensor, counts: Sequence[int]) -> Tensor:
        """All seats at once: ``tokens`` are in the order of seats, of which each has so many."""
        from workers.kernels.grouped_matmul import grouped_matmul

        inner = gated(grouped_matmul(hidden[tokens], self.gate_up, counts))
        answers = grouped_matmul(inner, self.down, counts).float() * weights[:, None]
        out = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        return out.index_add_(0, tokens, answers).to(hidden.dtype)

    def stored_parts(self) -> Iterator[tuple[str, StoredPart]]:
        """Every expert's projections under their checkpoint names."""
        hidden = uncut(self.gate_up.shape[2])
        for seat, expert in enumerate(self.held):
            gate, up = self.gate_up[seat].chunk(2)
            yield f"{expert}.{self._names.gate}.weight", StoredPart(gate, (self._inner, hidden))
            yield f"{expert}.{self._names.up}.weight", StoredPart(up, (self._inner, hidden))
            yield f"{expert}.{self._names.down}.weight", StoredPart(self.down[seat], (hidden, self._inner))
