"""Workloads of `baton bench serve`: random prompts, texts, or the replay of a trace."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from cluster.spec.errors import UserError
from cluster.spec.kv import counted

FIRST_TOKEN_ID = 300
"""First token id that is a complete character or word in common vocabularies. Smaller ids are special tokens and single
bytes, which an endpoint may hold back until they form a character; that would count as latency."""
VOCAB_SIZE = 4096
"""Upper bound on token ids, small enough for every model's vocabulary."""
BLOCK_LEN = 512
"""Number of prompt tokens that one hash id stands for."""
_WARM_UP_LEN = 256
"""Number of prompt tokens of the warm-up request before texts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomPrompt:
    """Prompt of random tokens. Prompts with equal leading seeds share a prefix."""

    input_len: int
    block_len: int
    block_seeds: tuple[str, ...]
    """Random seed of each block."""

    def token_ids(self) -> list[int]:
        tokens = [token for seed in self.block_seeds for token in random_tokens(seed, self.block_len)]
        return tokens[: self.input_len]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    arrival_s: float
    """Time to send the request, in seconds after the start."""
    output_len: int
    prompt: RandomPrompt | str

    def make_prompt(self) -> list[int] | str:
        """Return token ids, generated on demand because those of all prompts may not fit in memory, or a text."""
        return self.prompt if isinstance(self.prompt, str) else self.prompt.token_ids()


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    requests: Sequence[PlannedRequest]
    concurrency: int | None
    """Maximum number of requests in flight; None if there is no limit."""
    title: str

    @property
    def warm_up(self) -> PlannedRequest:
        """Request with the lengths of the first request, and with no prefix in common with any other."""
        first = self.requests[0]
        if isinstance(first.prompt, str):
            prompt = _random_prompt(_WARM_UP_LEN, "warm-up")
        else:
            prompt = replace(first.prompt, block_seeds=tuple(f"warm-up {seed}" for seed in first.prompt.block_seeds))
        return replace(first, prompt=prompt)


def random_workload(
    *, num_requests: int, input_len: int, output_len: int, concurrency: int | None, request_rate: float | None = None
) -> Workload:
    """Return requests of equal length without common prefixes.

    ``request_rate`` is the mean number of Poisson arrivals per second. If it is None, requests are sent as soon as the
    concurrency limit allows.

    Raises:
        UserError: a value is not allowed.
    """
    prompts = [(_random_prompt(input_len, f"prompt {index}"), output_len) for index in range(num_requests)]
    return _workload(prompts, f"{input_len}/{output_len} tokens", concurrency, request_rate)


def text_workload(
    texts: Sequence[tuple[str, int]], *, name: str, concurrency: int | None, request_rate: float | None
) -> Workload:
    """Return requests with the given prompts and lengths of answers. ``request_rate`` is as in `random_workload`."""
    return _workload(texts, name, concurrency, request_rate)


def _workload(
    prompts: Sequence[tuple[RandomPrompt | str, int]], kind: str, concurrency: int | None, request_rate: float | None
) -> Workload:
    if request_rate is not None:
        _check_positive("--request-rate", request_rate)
    requests = [
        PlannedRequest(arrival_s=arrival_s, output_len=output_len, prompt=prompt)
        for (prompt, output_len), arrival_s in zip(prompts, _arrivals_s(len(prompts), request_rate), strict=True)
    ]
    rate = f"{request_rate:g} requests/s" if request_rate else "closed loop"
    title = f"{counted(len(prompts), 'request')} of {kind}, {rate}, {_describe_limit(concurrency)}"
    return Workload(requests=requests, concurrency=concurrency, title=title)


def _random_prompt(input_len: int, seed: str) -> RandomPrompt:
    return RandomPrompt(input_len=input_len, block_len=input_len, block_seeds=(seed,))


def _arrivals_s(count: int, rate: float | None) -> list[float]:
    if rate is None:
        return [0.0] * count
    rng, times_s = random.Random("arrivals"), [0.0]
    while len(times_s) < count:
        times_s.append(times_s[-1] + rng.expovariate(rate))
    return times_s


class TraceEntry(msgspec.Struct, frozen=True):
    """Request of a trace. Two prompts share a prefix up to the first difference in their hash ids."""

    timestamp: float
    """Arrival time in milliseconds."""
    input_length: int
    output_length: int
    hash_ids: list[int]
    """One id for every 512 prompt tokens."""


def trace_workload(
    entries: Sequence[TraceEntry], *, scale: float = 1.0, speed: float = 1.0, concurrency: int | None = None
) -> Workload:
    """Return the requests of a trace, with lengths multiplied by ``scale`` and arrival times divided by ``speed``.

    Raises:
        UserError: a value is not allowed.
    """
    _check_positive("--trace-scale", scale)
    _check_positive("--trace-speed", speed)
    # Block lengths are rounded to integers so that common prefixes stay common.
    block_len, first_ms = max(1, round(BLOCK_LEN * scale)), entries[0].timestamp
    requests = [
        PlannedRequest(
            arrival_s=(entry.timestamp - first_ms) / 1000 / speed,
            output_len=max(1, entry.output_length * block_len // BLOCK_LEN),
            prompt=RandomPrompt(
                input_len=max(1, entry.input_length * block_len // BLOCK_LEN),
                block_len=block_len,
                block_seeds=tuple(f"block {hash_id}" for hash_id in entry.hash_ids),
            ),
        )
        for entry in entries
    ]
    lengths = f"lengths x {block_len / BLOCK_LEN:.3g}, speed x {speed:g}"
    title = f"{counted(len(entries), 'request')} of a trace, {lengths}, {_describe_limit(concurrency)}"
    return Workload(requests=requests, concurrency=concurrency, title=title)


def _check_positive(option: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise UserError(f"{option}: got {value}; allowed: a finite number greater than 0")


def random_tokens(seed: str, count: int) -> list[int]:
    """Return ids of ordinary tokens. Equal seeds yield equal ids."""
    return random.Random(seed).choices(range(FIRST_TOKEN_ID, VOCAB_SIZE), k=count)


def _describe_limit(concurrency: int | None) -> str:
    return f"concurrency {concurrency}" if concurrency else "unlimited concurrency"
