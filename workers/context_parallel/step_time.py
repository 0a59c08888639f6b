"""Chunk sizes after a prefix that take as long as a step. Pure. Attention makes a token after a long prefix many times
as expensive as one of a new prompt.

Attention makes a token behind a long prefix many times as expensive as one of a new prompt. Shares of a step are
shares of its time, and no new request waits long for the current step.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import sqrt

from workers.context_parallel.cost_model import ALL_REDUCES, ModelShape, Rates

ChunkLen = Callable[[int], int]
"""Function from a prefix length to the number of tokens after it that take a whole step's time; at least 1."""

_FIXED_COSTS = 20
"""Least duration of a step of a replica of one stage, as a multiple of the fixed cost of a step."""


@dataclass(frozen=True, slots=True)
class _Costs:
    token_s: float
    pair_s: float
    """Time per (query, key) pair."""
    fixed_s: float

    @classmethod
    def of(cls, shape: ModelShape, rates: Rates, cp: int) -> "_Costs":
        local_s = shape.linear_flops / rates.linear_flops_per_s + ALL_REDUCES * rates.all_reduce_row_s
        return cls(
            token_s=shape.num_layers * (local_s / cp + rates.row_s),
            pair_s=shape.num_layers * shape.attention_flops / rates.attention_flops_per_s / cp,
            fixed_s=rates.step_s
            + shape.num_layers * (rates.run_s + rates.exchange_s + ALL_REDUCES * rates.all_reduce_s),
        )

    def new_prompt_s(self, num_tokens: int) -> float:
        return num_tokens * (self.token_s + num_tokens / 2 * self.pair_s)


def slowest(measured: Iterable[tuple[ModelShape, Rates]], cp: int, num_tokens: int) -> tuple[ModelShape, Rates]:
    """Return the rank that is slowest in a step with this many tokens of a new prompt."""

    def step_s(rank: tuple[ModelShape, Rates]) -> float:
        costs = _Costs.of(*rank, cp)
        return costs.fixed_s + costs.new_prompt_s(num_tokens)

    return max(measured, key=step_s)


def even_chunk(shape: ModelShape, rates: Rates, cp: int, chunk_tokens: int, pp: int = 1) -> ChunkLen:
    """Chunks that take as long as ``chunk_tokens`` of a new prompt, when their work is evenly divided over the ranks.

    n tokens behind p take n * token_s + (n * p + n * n / 2) * pair_s, which is solved for n. Where several stages wait
    for each other's steps, all take as long as the first, of which ``chunk_tokens`` is the most, however short that is.
    """
    costs = _Costs.of(shape, rates, cp)
    least_s = _FIXED_COSTS * costs.fixed_s if pp == 1 else 0.0
    full_s = max(costs.new_prompt_s(chunk_tokens), least_s)

    @lru_cache(maxsize=4096)
    def chunk(prefix_len: int) -> int:
        one_s = costs.token_s + prefix_len * costs.pair_s
        return max(1, round(2 * full_s / (one_s + sqrt(one_s * one_s + 2 * costs.pair_s * full_s))))

    return chunk
