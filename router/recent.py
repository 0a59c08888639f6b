"""The requests that ended last, for people who look at the router."""

import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec

from router.answer import Answer
from router.phases import phases_of

MAX_KEPT = 50


class _Ended(msgspec.Struct, frozen=True):
    answer: Answer
    arrived_s: float
    ended_s: float
    unix_s: float
    num_prompt_tokens: int
    outcome: str


class RecentRequests:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._ended: deque[_Ended] = deque(maxlen=MAX_KEPT)

    def add(self, answer: Answer, arrived_s: float, num_prompt_tokens: int, outcome: str) -> None:
        """A request has ended now."""
        self._ended.appendleft(_Ended(answer, arrived_s, time.monotonic(), time.time(), num_prompt_tokens, outcome))

    def tell(self) -> Iterator[dict[str, Any]]:
        """The newest first; times in seconds."""
        for ended in self._ended:
            phases = phases_of(ended.answer, ended.ended_s)
            yield {
                "ended": ended.unix_s,
                "seconds": ended.ended_s - ended.arrived_s,
                "prompt_tokens": ended.num_prompt_tokens,
                "num_tokens": ended.answer.stream.num_tokens,
                "outcome": ended.outcome,
                "phases": [
                    {"name": phase.name, "seconds": phase.end_s - phase.start_s, "replica": phase.replica}
                    for phase in phases
                ],
            }
