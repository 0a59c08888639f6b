"""What a benchmark sends, and when: random prompts and arrival times, both a pure function of the seed."""

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from cluster.spec.errors import UserError

FIRST_TOKEN_ID = 10
"""Smaller ids are left out: models keep their special tokens there."""
FIRST_WORD_ID = 300
"""From here on tokens are whole characters or words in common vocabularies. Single bytes before it may be held back by
a streaming endpoint until they make a character, which would be measured as latency."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """One request to be sent."""

    arrival_s: float
    """Seconds after the start."""
    output_len: int
    make_prompt: Callable[[], list[int]]
    """Its token ids; made when it is sent, because all prompts of a long run would not fit into memory."""


class Workload(Protocol):
    """One benchmark run."""

    @property
    def concurrency(self) -> int | None:
        """Most requests open at once; None for no limit."""
        ...

    def requests(self) -> Sequence[PlannedRequest]:
        """In order of arrival; the same with every call."""
        ...

    def warmup(self, count: int) -> Sequence[PlannedRequest]:
        """Requests that are alike but have no prefix in common with those."""
        ...

    def settings(self) -> dict[str, Any]:
        """What was chosen, for a report that is read by programs."""
        ...

    def describe(self) -> str:
        """The same for people, in half a line."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomWorkload:
    """Prompts of one length that have nothing in common. Raises UserError when a value makes no sense."""

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
            check_least(f"--{name.replace('_', '-')}", getattr(self, name), 1)
        check_least("--vocab-size", self.vocab_size, FIRST_TOKEN_ID + 1)
        if self.concurrency is not None:
            check_least("--concurrency", self.concurrency, 1)
        if self.request_rate is None and self.concurrency is None:
            raise UserError("--concurrency: got none, and no --request-rate; allowed: at least one of them")
        if self.request_rate is not None and not 0 < self.request_rate < float("inf"):
            raise UserError(f"--request-rate: got {self.request_rate}; allowed: more than 0 a second, and finite")

    def requests(self) -> list[PlannedRequest]:
        """In order of arrival."""
        return [self._request(index, arrival_s) for index, arrival_s in enumerate(self.arrivals_s())]

    def warmup(self, count: int) -> list[PlannedRequest]:
        """Requests of the same lengths with other tokens."""
        other = replace(self, seed=self.seed + 1)
        return [other._request(index, 0.0) for index in range(count)]

    def settings(self) -> dict[str, Any]:
        """Every field."""
        return asdict(self)

    def describe(self) -> str:
        """How many, how long, how fast."""
        loop = f"at {self.request_rate:g} requests/s" if self.request_rate else "closed loop"
        limit = describe_limit(self.concurrency)
        return f"{self.num_requests} requests of {self.input_len}/{self.output_len} tokens, {loop}, {limit}"

    def arrivals_s(self) -> list[float]:
        """When each request is sent, in seconds from the start; all 0 in a closed loop."""
        if self.request_rate is None:
            return [0.0] * self.num_requests
        rng = random.Random(f"arrivals {self.seed}")
        times_s = [0.0]
        while len(times_s) < self.num_requests:
            times_s.append(times_s[-1] + rng.expovariate(self.request_rate))
        return times_s

    def _request(self, index: int, arrival_s: float) -> PlannedRequest:
        return PlannedRequest(
            arrival_s=arrival_s,
            output_len=self.output_len,
            make_prompt=lambda: random_tokens(f"prompt {self.seed} {index}", self.vocab_size, self.input_len),
        )


def describe_limit(concurrency: int | None) -> str:
    """A concurrency in words."""
    return f"at most {concurrency} at once" if concurrency else "no limit at once"


def random_tokens(seed: str, vocab_size: int, count: int) -> list[int]:
    """Token ids of ordinary tokens below the vocabulary size; the same for the same seed."""
    first = FIRST_WORD_ID if vocab_size > FIRST_WORD_ID else FIRST_TOKEN_ID
    return random.Random(seed).choices(range(first, vocab_size), k=count)


def check_least(name: str, value: int, minimum: int) -> None:
    """Raise UserError when a value is too small."""
    if value < minimum:
        raise UserError(f"{name}: got {value}; allowed: {minimum} or more")
