"""Numbers of tokens for prefill steps, from the cost model."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import sqrt

from workers.context_parallel.cost_model import ALL_REDUCES, ModelShape, Rates, dispatch_s

_FIXED_COSTS = 20
"""Minimum duration of an efficient step, as a multiple of the step's fixed cost."""

_SAMPLE_TOKENS = 1 << 16
"""Number of tokens per rank of a step that shows what an exchange of tokens takes per token."""

ChunkLen = Callable[[int], int]
"""Function that returns, for a prefix length, how many tokens after such a prefix fill a step: at least 1."""


@dataclass(frozen=True, slots=True)
class _Costs:
    token_s: float
    pair_s: float
    """Time per (query, key) pair, over all layers."""
    fixed_s: float
    hidden_s: float
    """Time of transfers that work hides, if there is enough, in any step."""
    windows: tuple[tuple[int, float], ...]
    """Window sizes in tokens, ascending, each with the share of a pair's time that it saves outside."""

    @property
    def efficient_s(self) -> float:
        """Return the minimum duration of an efficient step."""
        return max(_FIXED_COSTS * self.fixed_s, self.hidden_s)

    @classmethod
    def of(cls, shape: ModelShape, rates: Rates, cp: int) -> "_Costs":
        local_s = shape.linear_flops / rates.linear_flops_per_s + ALL_REDUCES * rates.all_reduce_row_s
        pair_flops = shape.attention_flops
        saved = [(window, num_layers / shape.num_layers) for window, num_layers in shape.windows]
        if shape.top_k is not None:
            # Later keys are only scored.
            pair_flops = shape.stored_pair_flops + shape.index_flops
            saved = [(shape.top_k, shape.stored_pair_flops / pair_flops)]
        weights_s = shape.num_layers * shape.weight_bytes / rates.exchange_bytes_per_s
        dispatch_fixed_s, dispatch_token_s = _dispatch_s(shape, rates, cp)
        return cls(
            token_s=shape.num_layers * (local_s / cp + rates.row_s + dispatch_token_s),
            pair_s=shape.num_layers * pair_flops / rates.attention_flops_per_s / cp,
            fixed_s=rates.step_s
            + shape.num_layers * (rates.run_s + rates.exchange_s + ALL_REDUCES * rates.all_reduce_s + dispatch_fixed_s)
            + weights_s * (1 - rates.hidden_share),
            hidden_s=weights_s * rates.hidden_share,
            windows=tuple(saved),
        )

    def new_prompt_s(self, num_tokens: int) -> float:
        saved_s = sum(share * max(0, num_tokens - window) ** 2 / 2 for window, share in self.windows) * self.pair_s
        return num_tokens * (self.token_s + num_tokens / 2 * self.pair_s) - saved_s

    def num_tokens(self, prefix_len: int, left_s: float) -> float:
        """Return how many tokens after a prefix take ``left_s`` seconds. The tokens fill one window after another."""
        num_tokens, token_s, pair_s = 0.0, self.token_s + prefix_len * self.pair_s, self.pair_s
        for window, share in self.windows:
            growing = max(0.0, window - prefix_len - num_tokens)
            growing_s = growing * (token_s + growing / 2 * pair_s)
            if growing_s >= left_s:
                break
            num_tokens, left_s = num_tokens + growing, left_s - growing_s
            token_s += growing * pair_s - max(0, prefix_len - window) * share * self.pair_s
            pair_s = max(0.0, pair_s - share * self.pair_s)
        return num_tokens + 2 * left_s / (token_s + sqrt(token_s * token_s + 2 * pair_s * left_s))


def _dispatch_s(shape: ModelShape, rates: Rates, cp: int) -> tuple[float, float]:
    """Return the fixed time and the time per token to exchange tokens between ranks with experts, by average layer."""
    if shape.experts is None:
        return 0.0, 0.0
    fixed_s, moved_s = dispatch_s(shape.experts.traffic([_SAMPLE_TOKENS] * cp * shape.experts.dp), rates)
    return shape.expert_share * fixed_s, shape.expert_share * moved_s / (_SAMPLE_TOKENS * cp)


def slowest(measured: Iterable[tuple[ModelShape, Rates]], cp: int, num_tokens: int) -> tuple[ModelShape, Rates]:
    """Return the shape and rates of the rank that is slowest in a step with ``num_tokens`` of a new prompt."""

    def step_s(rank: tuple[ModelShape, Rates]) -> float:
        costs = _Costs.of(*rank, cp)
        return costs.fixed_s + costs.new_prompt_s(num_tokens)

    return max(measured, key=step_s)


def even_chunk(shape: ModelShape, rates: Rates, cp: int, chunk_tokens: int, pp: int = 1) -> ChunkLen:
    """Return chunk sizes that take as long as ``chunk_tokens`` of a new prompt, with work divided evenly among ranks.

    Attention makes a token after a long prefix many times as expensive as a token of a new prompt. With chunks of
    equal duration, no new request waits long for the current step. n tokens after p tokens take
    n * token_s + (n * p + n * n / 2) * pair_s, less what windows save; n follows from this. Pipeline stages wait for
    each other's steps, so with several stages ``chunk_tokens`` is a maximum, however short steps are.
    """
    costs = _Costs.of(shape, rates, cp)
    least_s = costs.efficient_s if pp == 1 else 0.0
    full_s = max(costs.new_prompt_s(chunk_tokens), least_s)

    @lru_cache(maxsize=4096)
    def chunk(prefix_len: int) -> int:
        return max(1, round(costs.num_tokens(prefix_len, full_s)))

    return chunk


def efficient_share(shape: ModelShape, rates: Rates, cp: int, chunk_tokens: int) -> float:
    """Return the minimum duration of an efficient step, as a share of that of ``chunk_tokens`` of a new prompt."""
    costs = _Costs.of(shape, rates, cp)
    return min(1.0, costs.efficient_s / costs.new_prompt_s(chunk_tokens))
