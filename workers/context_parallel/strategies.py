"""Context-parallel strategies: pure functions from (extend lengths, prefix lengths, cp) to the runs of each rank.

A strategy may yield empty runs and runs that continue one another; the plan tidies them.
"""

import heapq
from collections.abc import Callable, Sequence

from cluster.spec.strategy import Strategy
from workers.attention.runs import Run

Split = Callable[[Sequence[int], Sequence[int], int], list[list[Run]]]


def none(extend_lens: Sequence[int], prefix_lens: Sequence[int], cp: int) -> list[list[Run]]:
    everything = [
        Run(request, prefix, length, 1)
        for request, (length, prefix) in enumerate(zip(extend_lens, prefix_lens, strict=True))
    ]
    return [everything] * cp


def whole_request(extend_lens: Sequence[int], prefix_lens: Sequence[int], cp: int) -> list[list[Run]]:
    """Assign whole requests, heaviest first, each to the rank with the least work; work is the number of (query, key)
    pairs.
    """
    work = [
        length * prefix + length * (length + 1) // 2 for length, prefix in zip(extend_lens, prefix_lens, strict=True)
    ]
    loads = [(0, cp_rank) for cp_rank in range(cp)]
    ranks: list[list[Run]] = [[] for _ in range(cp)]
    for request in sorted(range(len(work)), key=lambda request: -work[request]):
        load, cp_rank = loads[0]
        heapq.heapreplace(loads, (load + work[request], cp_rank))
        ranks[cp_rank].append(Run(request, prefix_lens[request], extend_lens[request], 1))
    return [sorted(runs, key=lambda run: run.request) for runs in ranks]


def contiguous(extend_lens: Sequence[int], prefix_lens: Sequence[int], cp: int) -> list[list[Run]]:
    return _by_segment(extend_lens, prefix_lens, cp, [[cp_rank] for cp_rank in range(cp)])


def zigzag(extend_lens: Sequence[int], prefix_lens: Sequence[int], cp: int) -> list[list[Run]]:
    """Assign each rank a light early segment and a heavy late one, so that causal work balances."""
    return _by_segment(extend_lens, prefix_lens, 2 * cp, [[cp_rank, 2 * cp - 1 - cp_rank] for cp_rank in range(cp)])


def interleave(extend_lens: Sequence[int], prefix_lens: Sequence[int], cp: int) -> list[list[Run]]:
    """Assign tokens round robin over the flattened batch: the next rank carries over from request to request."""
    ranks: list[list[Run]] = [[] for _ in range(cp)]
    start = 0
    for request, (length, prefix) in enumerate(zip(extend_lens, prefix_lens, strict=True)):
        for cp_rank, runs in enumerate(ranks):
            first = (cp_rank - start) % cp
            runs.append(Run(request, prefix + first, -((first - length) // cp), cp))
        start += length
    return ranks


def _by_segment(
    extend_lens: Sequence[int], prefix_lens: Sequence[int], parts: int, segments_of: Sequence[Sequence[int]]
) -> list[list[Run]]:
    """Divide every request into equal parts, the first ``length % parts`` one longer; a rank takes the named ones."""
    ranks: list[list[Run]] = [[] for _ in segments_of]
    for request, (length, prefix) in enumerate(zip(extend_lens, prefix_lens, strict=True)):
        base, rest = divmod(length, parts)
        for runs, segments in zip(ranks, segments_of, strict=True):
            runs.extend(
                Run(request, prefix + part * base + min(part, rest), base + (part < rest), 1) for part in segments
            )
    return ranks


STRATEGIES: dict[Strategy, Split] = {
    Strategy.NONE: none,
    Strategy.WHOLE_REQUEST: whole_request,
    Strategy.CONTIGUOUS: contiguous,
    Strategy.ZIGZAG: zigzag,
    Strategy.INTERLEAVE: interleave,
}
