"""Workloads of `baton bench serve`: random prompts and arrival times, a pure function of the seed."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.spec.errors import UserError

FIRST_TOKEN_ID = 10
"""Smallest token id of a prompt; models keep their special tokens below it."""
FIRST_WORD_ID = 300
"""Smallest token id that is a whole character or word in common vocabularies. Smaller ids are single bytes: an endpoint
may hold them back until they make a character, which would be measured as latency."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """One request to be sent."""

    arrival_s: float
    """Seconds after the start."""
    output_len: int
    make_prompt: Callable[[], list[int]]
    """Makes the token ids when the request is sent: all prompts of a long run would not fit into memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests of one benchmark run."""

    requests: Sequence[PlannedRequest]
    """Requests in order of arrival."""
    warmup: Callable[[int], Sequence[PlannedRequest]]
    """Makes similar requests that share no prefix with ``requests``."""
    concurrency: int | None
    """Maximum number of requests in flight; None for no limit."""
    settings: dict[str, Any]
    """Options for the JSON report."""
    title: str


def random_workload(
    *,
    num_requests: int,
    input_len: int,
    output_len: int,
    concurrency: int | None = None,
    request_rate: float | None = None,
    vocab_size: int = 4096,
    seed: int = 0,
) -> Workload:
    """Return prompts of one length that have nothing in common.

    ``request_rate`` is the mean of Poisson arrivals per second; without it, each response frees a slot for the next
    request.

    Raises:
        UserError: a value is not allowed.
    """
    settings = dict(locals())
    for name in ("num_requests", "input_len", "output_len"):
        check_least(name, settings[name], 1)
    check_common(vocab_size, concurrency)
    if request_rate is None and concurrency is None:
        raise UserError("--concurrency: got none, and no --request-rate; allowed: at least one of them")
    if request_rate is not None and not 0 < request_rate < float("inf"):
        raise UserError(f"--request-rate: got {request_rate}; allowed: a finite number greater than 0")

    def planned(index: int, arrival_s: float, seed: int) -> PlannedRequest:
        def make_prompt() -> list[int]:
            return random_tokens(f"prompt {seed} {index}", vocab_size, input_len)

        return PlannedRequest(arrival_s=arrival_s, output_len=output_len, make_prompt=make_prompt)

    rate = f"{request_rate:g} requests/s" if request_rate else "closed loop"
    return Workload(
        requests=[planned(*arrival, seed) for arrival in enumerate(_arrivals_s(num_requests, request_rate, seed))],
        warmup=lambda count: [planned(index, 0.0, seed + 1) for index in range(count)],
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
    first = FIRST_WORD_ID if vocab_size > FIRST_WORD_ID else FIRST_TOKEN_ID
    return random.Random(seed).choices(range(first, vocab_size), k=count)


def describe_limit(concurrency: int | None) -> str:
    """Return a concurrency in words."""
    return f"concurrency {concurrency}" if concurrency else "unlimited concurrency"


def check_common(vocab_size: int, concurrency: int | None) -> None:
    """Check the options that every workload has."""
    check_least("vocab_size", vocab_size, FIRST_TOKEN_ID + 1)
    if concurrency is not None:
        check_least("concurrency", concurrency, 1)


def check_least(name: str, value: int, minimum: int) -> None:
    """Raise UserError when the value of an option is too small."""
    if value < minimum:
        raise UserError(f"--{name.replace('_', '-')}: got {value}; allowed: {minimum} or more")
