"""Simulated client: its request, its output, and the promise that it sees exactly one end."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from cluster.simulator.device import answer
from cluster.simulator.memory import Violation
from cluster.simulator.scenario import Ask


class End(StrEnum):
    """End of a request, as its client sees it."""

    FINISHED = "finished"
    FAILED = "failed"
    LEFT = "left"
    """The client left."""
    REFUSED = "refused"
    """No replica was ready; nothing was sent."""
    DISCONNECTED = "disconnected"
    """The router died."""


@dataclass(slots=True, eq=False)
class Client:
    """Client that knows its answer in advance and checks every token."""

    ask: Ask
    tokens: bytes = b""
    end: End | None = None
    reason: str = ""
    expected: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.expected = answer(self.ask.prompt, self.ask.max_tokens)

    def take(self, token_ids: Sequence[int]) -> None:
        """Check tokens that arrived."""
        self.tokens += bytes(token_ids)
        if self.end is not None:
            raise Violation(f"tokens came after the request had {self.end}")
        if not self.expected.startswith(self.tokens):
            raise Violation(f"wrong tokens: {list(self.tokens)} came, {list(self.expected)} are right")

    def finish(self, end: End, reason: str = "") -> None:
        """Record the end of the request."""
        if self.end is not None:
            raise Violation(f"the request {end} after it had {self.end}")
        if end is End.FINISHED and self.tokens != self.expected[: self.ask.enough]:
            raise Violation(f"a short answer: {len(self.tokens)} of {self.ask.max_tokens} tokens")
        self.end, self.reason = end, reason
