"""Workloads of `baton bench serve`: random prompts and arrival times, a pure function of the seed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from cluster.spec.errors import UserError

FIRST_TOKEN_ID = 300
"""Smallest token id that is a whole character or word in common vocabularies. Smaller ids are special tokens and single
bytes: an endpoint may hold those back until they make a character, which would be measured as latency."""
VOCAB_SIZE = 4096
"""Upper bound of token ids; vocabularies are larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """One request to be sent."""

    arrival_s: float
    """Seconds after the start."""
    input_len: int
    output_len: int
    block_len: int
    block_seeds: tuple[str, ...]
    """Random seed of each block of the prompt; requests whose first seeds agree have a common prefix."""
    vocab_size: int = VOCAB_SIZE

    def make_prompt(self) -> list[int]:
        """Return the token ids; called when the request is sent, since all prompts of a run may not fit in memory."""
        tokens = [token for seed in self.block_seeds for token in random_tokens(seed, self.vocab_size, self.block_len)]
        return tokens[: self.input_len]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests of one benchmark run."""

    requests: Sequence[PlannedRequest]
    """Requests in order of arrival."""
    concurrency: int | None
    """Maximum number of requests in flight; None for no limit."""
    settings: dict[str, Any]
    """Options for the JSON report."""
    title: str

    @property
    def warm_up(self) -> PlannedRequest:
        """Request like the first one that shares no prefix with any."""
        first = self.requests[0]
        return replace(first, block_seeds=tuple(f"warm-up {seed}" for seed in first.block_seeds))


def random_workload(
    *,
    num_requests: int,
    input_len: int,
    output_len: int,
    concurrency: int | None = None,
    request_rate: float | None = None,
    seed: int = 0,
) -> Workload:
    """Return prompts of one length that have nothing in common.

    ``request_rate`` is the mean of Poisson arrivals per second; without it, each response frees a slot for the next
    request.

    Raises:
        UserError: a value is not allowed.
    """
    settings = dict(locals())
    if request_rate is None and concurrency is None:
        raise UserError("--concurrency: got none, and no --request-rate; allowed: at least one of them")
    if request_rate is not None and not 0 < request_rate < float("inf"):
        raise UserError(f"--request-rate: got {request_rate}; allowed: a finite number greater than 0")
    requests = [
        PlannedRequest(
            arrival_s=arrival_s,
            input_len=input_len,
            output_len=output_len,
            block_len=input_len,
            block_seeds=(f"prompt {seed} {index}",),
        )
        for index, arrival_s in enumerate(_arrivals_s(num_requests, request_rate, seed))
    ]
    rate = f"{request_rate:g} requests/s" if request_rate else "closed loop"
    return Workload(
        requests=requests,
        concurrency=concurrency,
        settings=settings,
        title=f"{num_requests} requests of {input_len}/{output_len} tokens, {rate}, {describe_limit(concurrency)}",
    )


def _arrivals_s(count: int, rate: float | None, seed: int) -> list[float]:
    """Return seconds from the start, all 0 in a closed loop."""
    if rate is None:
        return [0.0] * count
    rng, times_s = random.Random(f"arrivals {seed}"), [0.0]
    while len(times_s) < count:
        times_s.append(times_s[-1] + rng.expovariate(rate))
    return times_s


def random_tokens(seed: str, vocab_size: int, count: int) -> list[int]:
    """Return ids of ordinary tokens below the vocabulary size, the same ones for the same seed."""
    return random.Random(seed).choices(range(FIRST_TOKEN_ID, vocab_size), k=count)


def describe_limit(concurrency: int | None) -> str:
    return f"concurrency {concurrency}" if concurrency else "unlimited concurrency"
