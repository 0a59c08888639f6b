"""The experts of one rank: gated MLPs side by side, each multiplied with all of its tokens at once."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from workers.device import index_on
from workers.expert_parallel.routed import Routed
from workers.expert_parallel.seat_order import seat_order
from workers.expert_parallel.seats import ExpertSeats
from workers.kernel_devices import has_kernels
from workers.layers.cut import Cut, StoredPart, uncut
from workers.layers.gated_mlp import gated
from workers.layers.matmul import multiply
from workers.models.config import ExpertNames

FEW_CHOICES = 32_768
"""Up to so many, rows are kept for all, wherever their experts are, so that nobody waits for a count: 128 MiB for
hidden states of 2,048."""


class Experts(nn.Module):
    """Those in the seats of one EP rank, with a part of each one's width."""

    def __init__(self, hidden_size: int, inner: Cut, seats: ExpertSeats, ep_rank: int, names: ExpertNames) -> None:
        super().__init__()
        num_local = seats.num_local
        self.gate_up = nn.Parameter(torch.empty(num_local, 2 * inner.size, hidden_size), requires_grad=False)
        self.down = nn.Parameter(torch.empty(num_local, hidden_size, inner.size), requires_grad=False)
        self.loads = torch.zeros(num_local, dtype=torch.int64, device="cpu")
        """Tokens that each seat has computed since the start; on its device from the first ones on."""
        self.held: Sequence[int] = seats.held(ep_rank)
        """The logical expert at each seat."""
        self._first = ep_rank * num_local
        self._inner, self._names = inner, names

    def forward(self, routed: Routed) -> Tensor:
        """What these experts add, weighted, for each token: ``[tokens, hidden]``."""
        self.loads = self.loads.to(routed.hidden.device)  # once: each copy would wait for the GPU
        if has_kernels(routed.hidden):
            return self._grouped(routed)
        order, counts = self._counted(routed.experts)
        tokens, weights = order // routed.experts.shape[1], routed.weights.flatten()[order]
        out = torch.zeros(routed.hidden.shape, dtype=torch.float32, device=routed.hidden.device)
        for seat, (mine, weight) in enumerate(
            zip(torch.split(tokens, counts), torch.split(weights, counts), strict=True)
        ):
            if len(mine):
                inner = gated(multiply(routed.hidden[mine], self.gate_up[seat]))
                answer = multiply(inner, self.down[seat])
                out.index_add_(0, mine, answer.float() * weight[:, None])
        return out.to(routed.hidden.dtype)

    def _grouped(self, routed: Routed) -> Tensor:
        """All seats at once."""
        from workers.kernels.grouped_matmul import block_rows_for, grouped_matmul, tiles_of
        from workers.kernels.seat_rows import SeatRows, seat_rows
        from workers.kernels.sum_choices import sum_choices

        hidden, experts = routed.hidden, routed.experts
        if experts.numel() <= FEW_CHOICES:
            block_rows = block_rows_for(experts.numel(), len(self.loads), hidden.itemsize)
            seated = seat_rows(experts, self._first, self.loads, block_rows)
        else:
            order, counts = self._counted(experts)
            rows = torch.full_like(experts, -1)
            rows.view(-1)[order] = torch.arange(len(order), dtype=rows.dtype, device=rows.device)
            tokens = (order // experts.shape[1]).to(torch.int32)
            seated = SeatRows(tokens, rows, tiles_of(counts, hidden.itemsize, hidden.device))
        inner = gated(grouped_matmul(hidden, self.gate_up, seated.tiles, seated.tokens))
        return sum_choices(grouped_matmul(inner, self.down, seated.tiles), seated.rows, routed.weights)

    def _counted(self, experts: Tensor) -> tuple[Tensor, list[int]]:
        """See ``seat_order``."""
        order, counts = seat_order(experts, self._first, len(self.loads))
        self.loads += index_on(counts, self.loads.device)
        return order, counts

    def stored_parts(self) -> Iterator[tuple[str, StoredPart]]:
        """Every expert's projections under their checkpoint names."""
        hidden = uncut(self.gate_up.shape[2])
        for seat, expert in enumerate(self.held):
            gate, up = self.gate_up[seat].chunk(2)
            yield f"{expert}.{self._names.gate}.weight", StoredPart(gate, (self._inner, hidden))
            yield f"{expert}.{self._names.up}.weight", StoredPart(up, (self._inner, hidden))
            yield f"{expert}.{self._names.down}.weight", StoredPart(self.down[seat], (hidden, self._inner))
