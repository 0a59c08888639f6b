"""Assignment of tokens to ranks: the plan that every context-parallel strategy yields.

Nothing else in the engine knows which strategy ran. No torch, no I/O.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cluster.spec.strategy import Strategy
from workers.attention.runs import RankRuns, Run, coalesce
from workers.context_parallel.strategies import STRATEGIES, none

Indices = NDArray[np.int64]


class Owner(NamedTuple):
    """Location where one token is computed."""

    cp_rank: int
    offset: int
    """Row in that rank's local order."""


@dataclass(frozen=True)
class ShardPlan:
    """One step's extend tokens divided over the CP ranks.

    The *flattened batch* is all extend tokens, request after request. The *gathered order* is the local rows of
    rank 0, 1, ... each padded to ``padded_len``; in a replicated plan it is the flattened batch itself.
    """

    cp: int
    strategy: Strategy
    extend_lens: tuple[int, ...]
    prefix_lens: tuple[int, ...]
    runs: tuple[RankRuns, ...]
    """Runs by rank, in local order; a rank has no run for a request of which it computes no token."""

    @property
    def replicated(self) -> bool:
        """Return whether every rank computes every token, so that no collective runs."""
        return self.cp == 1 or self.strategy is Strategy.NONE

    @cached_property
    def num_tokens(self) -> int:
        """Extend tokens of all requests."""
        return sum(self.extend_lens)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Flattened index of each request's first extend token, then the total."""
        return tuple(accumulate(self.extend_lens, initial=0))

    @cached_property
    def lens(self) -> tuple[int, ...]:
        """Tokens by rank."""
        return tuple(sum(run.count for run in runs) for runs in self.runs)

    @cached_property
    def padded_len(self) -> int:
        """Tokens of the longest rank."""
        return max(self.lens)

    @cached_property
    def gathered_index(self) -> Indices:
        """``[cp * padded_len]``: flattened index of each gathered row; ``num_tokens`` marks padding."""
        if self.replicated:
            return np.arange(self.num_tokens, dtype=np.int64)
        index = np.full((self.cp, self.padded_len), self.num_tokens, dtype=np.int64)
        for cp_rank, length in enumerate(self.lens):
            index[cp_rank, :length] = self.local(cp_rank)
        return index.reshape(-1)

    @cached_property
    def inverse(self) -> Indices:
        """``[num_tokens]``: gathered row of each token of the flattened batch."""
        rows = np.empty(self.num_tokens + 1, dtype=np.int64)
        rows[self.gathered_index] = np.arange(len(self.gathered_index), dtype=np.int64)
        return rows[:-1]

    def local(self, cp_rank: int) -> Indices:
        """Return flattened indices of the tokens that a rank computes, in its local order."""
        if self.replicated:
            return np.arange(self.num_tokens, dtype=np.int64)
        parts = [self._flattened(run) for run in self.runs[cp_rank]]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def owner(self, token: int) -> Owner:
        """Return where a token of the flattened batch is computed; rank 0 stands for all ranks of a replicated plan."""
        if self.replicated:
            return Owner(0, token)
        return Owner(*divmod(int(self.inverse[token]), self.padded_len))

    def last_token(self, request: int) -> int:
        """Return the flattened index of a request's last extend token."""
        assert self.extend_lens[request] > 0, f"request {request} extends by no token"
        return self.starts[request + 1] - 1

    def _flattened(self, run: Run) -> Indices:
        first = self.starts[run.request] + run.first_position - self.prefix_lens[run.request]
        return np.arange(first, first + run.count * run.step, run.step, dtype=np.int64)


def make_shard_plan(strategy: Strategy, extend_lens: Sequence[int], prefix_lens: Sequence[int], cp: int) -> ShardPlan:
    """Divide a step's tokens; ``extend_lens`` are computed now, ``prefix_lens`` are already cached."""
    assert cp > 0, f"cp must be positive, got {cp}"
    assert len(extend_lens) == len(prefix_lens), f"{len(extend_lens)} extend lengths, {len(prefix_lens)} prefixes"
    assert min((*extend_lens, *prefix_lens), default=0) >= 0, f"negative length in {extend_lens} or {prefix_lens}"
    split = STRATEGIES[strategy] if cp > 1 else none
    if split is none:
        # Nothing to tidy; a decode step needs nothing more.
        runs = (tuple(run for run in none(extend_lens, prefix_lens, 1)[0] if run.count),) * cp
    else:
        runs = tuple(coalesce(rank_runs) for rank_runs in split(extend_lens, prefix_lens, cp))
    return ShardPlan(cp, strategy, tuple(extend_lens), tuple(prefix_lens), runs)
