"""Open and recently finished HTTP requests, for the status page."""

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from router.answer import Answer, Summary
from router.request import GenerateRequest

MAX_RECENT = 50
MAX_SHOWN = 50
"""Maximum number of open requests on the page."""


class Overview:
    """All open HTTP requests of one router process, and the latest finished ones."""

    def __init__(self) -> None:
        self._open: dict[int, OpenRequest] = {}
        """Open requests by identity, in order of their arrival."""
        self.recent: deque[Summary] = deque(maxlen=MAX_RECENT)
        """Summaries of the latest finished requests, newest first."""

    @contextmanager
    def show(self, requests: Sequence[GenerateRequest]) -> Iterator["OpenRequest"]:
        """Show an HTTP request with these choices as open until the context exits."""
        shown = OpenRequest(requests)
        self._open[id(shown)] = shown
        try:
            yield shown
        finally:
            del self._open[id(shown)]

    @property
    def num_open(self) -> int:
        return len(self._open)

    def open_entries(self, now_s: float) -> list[dict[str, Any]]:
        """Return the entries of the requests that have been open for longest, on the router's clock."""
        return [request.entry(now_s) for request in itertools.islice(self._open.values(), MAX_SHOWN)]


@dataclass(eq=False, slots=True)
class OpenRequest:
    """HTTP request that waits for capacity or is being answered."""

    requests: Sequence[GenerateRequest]
    answer: Answer | None = None
    """None while the request waits for capacity."""

    def entry(self, now_s: float) -> dict[str, Any]:
        first, answer = self.requests[0], self.answer
        return {
            "id": first.request_id,
            "key": first.tenant,
            "age": now_s - first.arrived_s,
            "phase": "queue" if answer is None else "prefill" if answer.first_s is None else "decode",
            "prefill": "" if answer is None else answer.prefills,
            "decode": "" if answer is None else answer.decodes,
            "prompt_tokens": sum(len(request.prompt_ids) for request in self.requests if not request.shares_prompt),
            "num_tokens": 0 if answer is None else answer.num_tokens,
        }
