"""Steps as ranks receive them, built from tokens, prefixes and pages."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cluster.spec.ids import Room
from cluster.spec.step_messages import ScheduledRequest
from cluster.spec.strategy import Passing, Strategy
from workers.context_parallel.shard_plan import make_step_shape
from workers.engine.batch import StepInput


class Request(NamedTuple):
    """Part of one request in a step, with its page table."""

    token_ids: Sequence[int]
    prefix_len: int
    pages: Sequence[int] | NDArray[np.int64] = ()
    samples: bool = True
    scored: bool = False


def scheduled_of(requests: Sequence[Request]) -> list[ScheduledRequest]:
    """Return the scheduled requests, in rooms 0, 1, ..."""
    return [
        ScheduledRequest(
            room=Room(number),
            first_position=request.prefix_len,
            token_ids=list(request.token_ids),
            new_pages=[],
            samples=request.samples,
            output_position=0,
            scored_ids=list(request.token_ids) if request.scored else [],
        )
        for number, request in enumerate(requests)
    ]


def requests_of(extend_lens: Sequence[int], prefix_lens: Sequence[int]) -> list[ScheduledRequest]:
    """Return scheduled requests of these lengths."""
    lens = zip(extend_lens, prefix_lens, strict=True)
    return scheduled_of([Request([0] * extend_len, prefix_len) for extend_len, prefix_len in lens])


def step_of(
    requests: Sequence[Request], strategy: Strategy = Strategy.NONE, cp: int = 1, passing: Passing | None = None
) -> StepInput:
    scheduled = scheduled_of(requests)
    tables = [np.asarray(request.pages, dtype=np.int64) for request in requests]
    return StepInput(scheduled, [tables], make_step_shape(scheduled, strategy, passing, cp))
