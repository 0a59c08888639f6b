"""Feed-forward part of a decoder layer: a gated MLP or a mixture of experts."""

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from workers.device import device_of
from workers.expert_parallel.token_dispatcher import NO_EXPERT, RoutedTokens, make_dispatcher, order_by_expert
from workers.kernels.elementwise import elementwise_kernels
from workers.layers.config import FEW_CHOICES, MOST_ANSWER_BYTES, ExpertRouterConfig, MoeConfig
from workers.layers.linear import FusedLinear, LinearLayer, ReplicatedLinear, SummedLinear
from workers.layers.matmul import PackedMatrix, multiply, packed, weights_of
from workers.layers.shard import Shard, ShardedLayer, WeightShard, even_shard, replicated
from workers.native.library import Library
from workers.native.products import ExpertWeights
from workers.parallel.exchanges import Lens, TokenExchange
from workers.parallel.model_groups import ModelGroups
from workers.quant.fp8_matrix import Fp8Matrix, split_rows

if TYPE_CHECKING:  # no CPU imports kernels of a GPU
    from workers.kernels.experts import RowTiles

_ENOUGH_ROWS = 16
"""Number of rows that native code must multiply as fast as oneDNN to compute the experts of any number of tokens. For
many, oneDNN can be faster, but copies between its products take longer.
"""
_LEAST_SUM = 1e-20
"""Term added to the sum of a token's weights, which can be zero if they are sigmoids."""


def gated(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, where ``gate_up`` is [num_tokens, 2 * size]."""
    if (kernels := elementwise_kernels(gate_up)) is not None:
        return kernels.swiglu(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


class GatedMLP(nn.Module):
    """Gated MLP whose width is sharded over the TP ranks of all DP ranks. The DP ranks gather their tokens."""

    def __init__(self, hidden_size: int, intermediate_size: int, groups: ModelGroups, *, bias: bool) -> None:
        super().__init__()
        inner = even_shard(intermediate_size, groups.dense_width)
        self.gate_up = FusedLinear(hidden_size, {"gate": inner, "up": inner}, bias=bias)
        self.down = SummedLinear(inner, hidden_size, bias=bias)
        self._exchange = TokenExchange(groups.dp, groups.dense_shards, groups.tp)

    def forward(self, x: Tensor, lens: Lens) -> Tensor:
        inner = self._inner(self._exchange.gather(x, lens))
        out: Tensor = self.down(inner, lambda terms: self._exchange.scatter_sums(terms, lens))
        return out

    def _inner(self, x: Tensor) -> Tensor:
        weight, bias = self.gate_up.weight, self.gate_up.bias
        inner = weight.multiply_gated(x, bias) if isinstance(weight, PackedMatrix) else None
        return gated(self.gate_up(x)) if inner is None else inner


class ExpertRouter(LinearLayer):
    """Router whose weights every rank holds in full. Scores precede top-k, as in training."""

    wide = frozenset({"e_score_correction_bias"})

    def __init__(self, hidden_size: int, moe: MoeConfig) -> None:
        super().__init__(moe.num_experts, hidden_size)
        self.e_score_correction_bias: nn.Parameter | None = None
        if moe.router.has_bias:
            self.e_score_correction_bias = nn.Parameter(torch.empty(moe.num_experts), requires_grad=False)
        self._moe = moe

    def pack(self, library: Library | None) -> None:
        if not self._moe.router.is_fp32:
            super().pack(library)

    def forward(self, hidden: Tensor, counted: Tensor | None = None) -> RoutedTokens:
        """Route ``hidden [tokens, hidden]``. See AttentionContext for ``counted``."""
        moe = self._moe
        if moe.router.is_fp32:
            assert isinstance(self.weight, Tensor), "the weight is packed"
            logits = multiply(hidden.float(), self.weight.float())
        else:
            logits = multiply(hidden, self.weight)
        if moe.router == ExpertRouterConfig() and (choose := self._kernel(logits)) is not None:
            return RoutedTokens(hidden, *choose(logits, moe.top_k, counted, sum_to_one=moe.renormalize))
        weights, experts = self._choose(logits.float())
        experts = experts.to(torch.int32)
        return RoutedTokens(hidden, experts if counted is None else experts.masked_fill(~counted, NO_EXPERT), weights)

    def _kernel(self, logits: Tensor) -> Callable[..., tuple[Tensor, Tensor]] | None:
        """Return the kernel that chooses by ``logits``, if there is any."""
        if device_of(logits).has_kernels:
            from workers.kernels.experts import choose_experts

            return choose_experts
        native = self.weight.native if isinstance(self.weight, PackedMatrix) else None
        return None if native is None else native.library.products.choose_experts

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights and numbers of each token's experts, ``[tokens, top_k]``, given fp32 logits."""
        moe, router = self._moe, self._moe.router
        scores = logits.softmax(dim=-1) if router.scores == "softmax" else logits.sigmoid()
        ranks = scores if self.e_score_correction_bias is None else scores + self.e_score_correction_bias
        if router.num_groups > 1:
            ranks = _in_best_groups(ranks, router)
        experts = ranks.topk(moe.top_k, dim=-1).indices
        weights = scores.gather(1, experts)
        if moe.renormalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + _LEAST_SUM)
        return weights if router.scale == 1.0 else weights * router.scale, experts


def _in_best_groups(ranks: Tensor, router: ExpertRouterConfig) -> Tensor:
    """Replace ``ranks [tokens, experts]`` outside of each token's best groups by -inf."""
    by_group = ranks.view(len(ranks), router.num_groups, ranks.shape[1] // router.num_groups)
    of_group = by_group.topk(router.num_best, dim=-1).values.sum(dim=-1)
    chosen = of_group.topk(router.top_groups, dim=-1).indices
    is_chosen = torch.zeros_like(of_group, dtype=torch.bool).scatter_(1, chosen, value=True)
    return by_group.masked_fill(~is_chosen[..., None], -torch.inf).flatten(1)


ExpertMatrices = nn.Parameter | Fp8Matrix | list[PackedMatrix]
"""Matrices ``[experts, outputs, inputs]``."""


class Experts(ShardedLayer):
    """Experts of one EP rank. This rank holds a shard of each expert's width."""

    def __init__(self, hidden_size: int, inner: Shard, numbers: range) -> None:
        super().__init__()
        num_local = len(numbers)
        gate_up, down = (num_local, 2 * inner.size, hidden_size), (num_local, hidden_size, inner.size)
        self.gate_up: ExpertMatrices = nn.Parameter(torch.empty(gate_up), requires_grad=False)
        self.down: ExpertMatrices = nn.Parameter(torch.empty(down), requires_grad=False)
        self.loads = torch.zeros(num_local, dtype=torch.int64, device="cpu")
        """Number of tokens that each expert has computed since startup. Moved to the GPU in the first step."""
        self.numbers = numbers
        """Numbers of these experts in the model."""
        self._inner = inner

    def pack(self, library: Library | None) -> None:
        """Rearrange loaded weights for speed."""
        gate_up, down = self.gate_up, self.down
        if not isinstance(gate_up, Tensor) or not isinstance(down, Tensor) or gate_up.dtype != torch.bfloat16:
            return
        unit = 1 if library is None else library.products.block_widths[-1]
        first = [packed(_pad_outputs(matrix, unit), library) for matrix in gate_up]
        second = [packed(_pad_inputs(matrix, unit), library) for matrix in down]
        if all(isinstance(matrix, PackedMatrix) for matrix in first + second):
            del self.gate_up, self.down  # parameters
            self.gate_up, self.down = cast("list[PackedMatrix]", first), cast("list[PackedMatrix]", second)

    def forward(self, routed: RoutedTokens) -> Tensor:
        """Return the weighted sum of these experts' outputs for each token, ``[tokens, hidden]``."""
        self.loads = self.loads.to(routed.hidden.device)  # copied only once, since a copy waits for the GPU
        if device_of(routed.hidden).has_kernels:
            return self._grouped(routed)
        if routed.experts.numel() and routed.experts.numel() <= self.most_uncounted:
            return self._together(routed)
        order, counts = self._counted(routed.experts)
        tokens, weights = order // routed.experts.shape[1], routed.weights.flatten()[order]
        out = torch.zeros(routed.hidden.shape, dtype=torch.float32, device=routed.hidden.device)
        for expert, (mine, weight) in enumerate(
            zip(torch.split(tokens, counts), torch.split(weights, counts), strict=True)
        ):
            if len(mine):
                # In one expression, so that no intermediate result outlives its use.
                answer = multiply(
                    gated(multiply(routed.hidden.index_select(0, mine), self.gate_up[expert])), self.down[expert]
                ).float()
                out.index_add_(0, mine, answer.mul_(weight[:, None]))
                del answer
        return out.to(routed.hidden.dtype)

    @property
    def most_uncounted(self) -> int:
        """Return the maximum number of choices for which the host need not count the tokens of each expert."""
        gate_up, down = self.gate_up, self.down
        if isinstance(gate_up, list) and isinstance(down, list):
            # Native code does not know all layouts, as that of an odd number of inputs.
            native = gate_up[0].native if down[0].native is not None else None
            if native is None:
                return 0
            return sys.maxsize if native.most_rows >= _ENOUGH_ROWS else native.most_rows * len(gate_up)
        has_kernels = isinstance(gate_up, Fp8Matrix) or (isinstance(gate_up, Tensor) and device_of(gate_up).has_kernels)
        return FEW_CHOICES if has_kernels else 0

    def _together(self, routed: RoutedTokens) -> Tensor:
        """Compute all experts in native code."""
        gate_up, down = self.gate_up, self.down
        assert isinstance(gate_up, list), "weights are not packed"
        assert isinstance(down, list), "weights are not packed"
        assert gate_up[0].native is not None, "native code does not multiply by the weights"
        weights = ExpertWeights(weights_of(gate_up), weights_of(down), self.numbers.start)
        products = gate_up[0].native.library.products
        return products.experts(*routed, weights, self.loads, most_answer_bytes=MOST_ANSWER_BYTES)

    def _grouped(self, routed: RoutedTokens) -> Tensor:
        from workers.kernels import experts as kernels

        hidden, experts = routed.hidden, routed.experts
        if experts.numel() <= self.most_uncounted:
            block_rows = kernels.block_rows_for(experts.numel(), len(self.loads), hidden.itemsize)
            sorted_rows = kernels.expert_rows(experts, self.numbers.start, self.loads, block_rows)
        else:
            order, counts = self._counted(experts)
            rows = torch.full_like(experts, -1)
            rows.view(-1)[order] = torch.arange(len(order), dtype=rows.dtype, device=rows.device)
            tokens = (order // experts.shape[1]).to(torch.int32)
            sorted_rows = kernels.ExpertRows(tokens, rows, kernels.tiles_of(counts, hidden))
        inner = gated(_grouped_product(hidden, _unpacked(self.gate_up), sorted_rows.tiles, sorted_rows.tokens))
        answers = _grouped_product(inner, _unpacked(self.down), sorted_rows.tiles)
        return kernels.sum_choices(answers, sorted_rows.rows, routed.weights)

    def _counted(self, experts: Tensor) -> tuple[Tensor, list[int]]:
        """Return ``order_by_expert`` for ``experts``, and add the number of choices per expert to the loads."""
        order, counts = order_by_expert(experts, self.numbers.start, len(self.loads))
        self.loads += device_of(self.loads).put_index(counts)
        return order, counts

    def weights(self) -> Iterator[tuple[str, WeightShard]]:
        gate_up, down = _unpacked(self.gate_up), _unpacked(self.down)
        hidden = replicated(gate_up.shape[2])
        for index, expert in enumerate(self.numbers):
            gate, up = split_rows(gate_up[index], [self._inner.size] * 2)
            yield f"{expert}.gate.weight", WeightShard(gate, (self._inner, hidden), "gate_up")
            yield f"{expert}.up.weight", WeightShard(up, (self._inner, hidden), "gate_up")
            yield f"{expert}.down.weight", WeightShard(down[index], (hidden, self._inner), "down")


def _pad_inputs(matrix: Tensor, unit: int) -> Tensor:
    """Append zeros so that the number of inputs is a multiple of ``unit``."""
    rest = -matrix.shape[1] % unit
    return functional.pad(matrix, (0, rest)) if rest else matrix


def _pad_outputs(gate_up: Tensor, unit: int) -> Tensor:
    """Append zeros so that gate and up each have a multiple of ``unit`` outputs, as native code requires."""
    gate, up = gate_up.chunk(2)
    rest = -len(gate) % unit
    return torch.cat([functional.pad(part, (0, 0, 0, rest)) for part in (gate, up)]) if rest else gate_up


def _unpacked(matrices: ExpertMatrices) -> nn.Parameter | Fp8Matrix:
    assert not isinstance(matrices, list), "the matrices are packed"
    return matrices


def _grouped_product(
    x: Tensor, weights: Tensor | Fp8Matrix, tiles: "RowTiles", sources: Tensor | None = None
) -> Tensor:
    """Multiply like ``multiply``, each row with the matrix of its tile, on a device with kernels."""
    if isinstance(weights, Fp8Matrix):
        from workers.kernels.fp8 import grouped_fp8_matmul

        return grouped_fp8_matmul(x, weights.values, weights.scales, weights.width, tiles, sources)
    from workers.kernels.experts import grouped_matmul

    return grouped_matmul(x, weights, tiles, sources)


class MoeBlock(nn.Module):
    def __init__(self, hidden_size: int, moe: MoeConfig, groups: ModelGroups) -> None:
        super().__init__()
        num_local, ep_rank = moe.num_experts // groups.parallel.ep, groups.position.ep
        self.router = ExpertRouter(hidden_size, moe)
        inner = even_shard(moe.intermediate_size, groups.expert_width)
        self.experts = Experts(hidden_size, inner, range(ep_rank * num_local, (ep_rank + 1) * num_local))
        self.shared_expert: GatedMLP | None = None
        self.shared_expert_gate: ReplicatedLinear | None = None
        if moe.shared_size:
            self.shared_expert = GatedMLP(hidden_size, moe.shared_size, groups, bias=False)
            if moe.has_shared_gate:
                self.shared_expert_gate = ReplicatedLinear(hidden_size, 1)
        self._dispatcher = make_dispatcher(groups, moe.top_k, num_local, moe.router.reach)

    def forward(self, x: Tensor, lens: Lens, counted: Tensor | None = None) -> Tensor:
        routed = self._dispatcher.run(self.router(x, counted), lens, self.experts)
        if self.shared_expert is None:
            return routed
        shared: Tensor = self.shared_expert(x, lens)
        if self.shared_expert_gate is not None:
            shared = self.shared_expert_gate(x).sigmoid() * shared
        return routed + shared
