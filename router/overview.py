"""Open and recently finished HTTP requests, for the status page."""

import itertools
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

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

    def show(self, requests: Sequence[GenerateRequest]) -> "OpenRequest":
        """Show an HTTP request with these choices as open until the returned context exits."""
        return OpenRequest(self._open, requests)

    @property
    def num_open(self) -> int:
        return len(self._open)

    def open_entries(self, now_s: float) -> list[dict[str, Any]]:
        """Return the entries of the requests that have been open for longest, on the router's clock."""
        return [request.entry(now_s) for request in itertools.islice(self._open.values(), MAX_SHOWN)]


class OpenRequest:
    """HTTP request that waits for capacity or is being answered."""

    def __init__(self, all_open: "dict[int, OpenRequest]", requests: Sequence[GenerateRequest]) -> None:
        self._all_open = all_open
        self._requests = requests
        self.answer: Answer | None = None
        """None while the request waits for capacity."""

    def __enter__(self) -> Self:
        self._all_open[id(self)] = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del self._all_open[id(self)]

    def entry(self, now_s: float) -> dict[str, Any]:
        first, answer = self._requests[0], self.answer
        return {
            "id": first.request_id,
            "key": first.tenant,
            "age": now_s - first.arrived_s,
            "phase": "queue" if answer is None else "prefill" if answer.first_s is None else "decode",
            "prefill": "" if answer is None else answer.prefills,
            "decode": "" if answer is None else answer.decodes,
            "prompt_tokens": sum(len(request.prompt_ids) for request in self._requests if not request.shares_prompt),
            "num_tokens": 0 if answer is None else answer.num_tokens,
        }
