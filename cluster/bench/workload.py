"""What a benchmark sends, and when: random prompts and arrival times, both a pure function of the seed."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from cluster.spec.errors import UserError

FIRST_TOKEN_ID = 10
"""Smaller ids are left out: models keep their special tokens there."""
FIRST_WORD_ID = 300
"""From here on tokens are whole characters or words in common vocabularies. Single bytes before it may be held back by
a streaming endpoint until they make a character, which would be measured as latency."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One benchmark run. Raises UserError when a value makes no sense."""

    num_requests: int
    input_len: int
    """Tokens of each prompt."""
    output_len: int
    """Tokens of each answer."""
    concurrency: int | None
    """Most requests open at once; None for no limit, which needs a request rate."""
    request_rate: float | None = None
    """Mean arrivals per second, Poisson; None for a closed loop, where each answer makes room for the next request."""
    vocab_size: int = 4096
    """Prompts are drawn from the token ids [300, vocab_size), or [10, vocab_size) if it is smaller than that."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_requests", "input_len", "output_len"):
            _check(name, getattr(self, name), 1)
        _check("vocab_size", self.vocab_size, FIRST_TOKEN_ID + 1)
        if self.concurrency is not None:
            _check("concurrency", self.concurrency, 1)
        if self.request_rate is None and self.concurrency is None:
            raise UserError("a closed loop needs a concurrency: give it, or a request rate")
        if self.request_rate is not None and not self.request_rate > 0:
            raise UserError(f"request_rate is {self.request_rate}, must be more than 0 per second")

    def prompts(self) -> Iterator[list[int]]:
        """The token ids of every prompt, in order of sending."""
        rng = random.Random(self.seed)
        first = FIRST_WORD_ID if self.vocab_size > FIRST_WORD_ID else FIRST_TOKEN_ID
        for _ in range(self.num_requests):
            yield [rng.randrange(first, self.vocab_size) for _ in range(self.input_len)]

    def arrivals_s(self) -> list[float]:
        """When each request is sent, in seconds from the start; all 0 in a closed loop."""
        if self.request_rate is None:
            return [0.0] * self.num_requests
        rng = random.Random(f"arrivals {self.seed}")
        times_s = [0.0]
        while len(times_s) < self.num_requests:
            times_s.append(times_s[-1] + rng.expovariate(self.request_rate))
        return times_s


def _check(name: str, value: int, minimum: int) -> None:
    if value < minimum:
        raise UserError(f"{name} is {value}, must be at least {minimum}")
