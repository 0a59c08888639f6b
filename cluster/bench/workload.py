"""Workloads of `baton bench serve`: random prompts, or the replay of a trace.

Traces are in Mooncake's format (https://github.com/kvcache-ai/Mooncake, FAST25-release/traces): JSON lines with a
``timestamp`` in milliseconds, ``input_length``, ``output_length`` and ``hash_ids``, one for every 512 prompt tokens.
Two prompts share a prefix up to the first difference in their hash ids.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from cluster.spec.errors import UserError

FIRST_TOKEN_ID = 300
"""First token id that is a complete character or word in common vocabularies. Smaller ids are special tokens and single
bytes, which an endpoint may hold back until they form a character; that would count as latency."""
VOCAB_SIZE = 4096
"""Upper bound on token ids, small enough for every model's vocabulary."""
BLOCK_LEN = 512
"""Number of prompt tokens that one hash id stands for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    arrival_s: float
    """Time to send the request, in seconds after the start."""
    input_len: int
    output_len: int
    block_len: int
    block_seeds: tuple[str, ...]
    """Random seed of each block of the prompt. Requests with equal leading seeds share a prefix."""

    def make_prompt(self) -> list[int]:
        """Return the token ids. They are generated on demand because all prompts together may not fit in memory."""
        tokens = [token for seed in self.block_seeds for token in random_tokens(seed, self.block_len)]
        return tokens[: self.input_len]


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
        return replace(first, block_seeds=tuple(f"warm-up {seed}" for seed in first.block_seeds))


def random_workload(
    *, num_requests: int, input_len: int, output_len: int, concurrency: int | None, request_rate: float | None = None
) -> Workload:
    """Return requests of equal length without common prefixes.

    ``request_rate`` is the mean number of Poisson arrivals per second. If it is None, requests are sent as soon as the
    concurrency limit allows.

    Raises:
        UserError: a value is not allowed.
    """
    if request_rate is not None:
        _check_positive("--request-rate", request_rate)
    requests = [
        PlannedRequest(
            arrival_s=arrival_s,
            input_len=input_len,
            output_len=output_len,
            block_len=input_len,
            block_seeds=(f"prompt {index}",),
        )
        for index, arrival_s in enumerate(_arrivals_s(num_requests, request_rate))
    ]
    rate = f"{request_rate:g} requests/s" if request_rate else "closed loop"
    title = f"{num_requests} requests of {input_len}/{output_len} tokens, {rate}, {_describe_limit(concurrency)}"
    return Workload(requests=requests, concurrency=concurrency, title=title)


def _arrivals_s(count: int, rate: float | None) -> list[float]:
    if rate is None:
        return [0.0] * count
    rng, times_s = random.Random("arrivals"), [0.0]
    while len(times_s) < count:
        times_s.append(times_s[-1] + rng.expovariate(rate))
    return times_s


class TraceEntry(msgspec.Struct, frozen=True):
    timestamp: float
    """Arrival time in milliseconds."""
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_trace(path: Path, most: int | None = None) -> list[TraceEntry]:
    """Return the entries of a trace file, sorted by time; with ``most``, only that many of the earliest.

    Raises:
        UserError: the file cannot be read, is empty, or has an invalid line.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    entries = [_entry(f"{path}, line {number}", line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not entries:
        raise UserError(f"{path}: got no requests; allowed: 1 or more")
    return sorted(entries, key=lambda entry: entry.timestamp)[:most]


def _entry(where: str, line: bytes) -> TraceEntry:
    try:
        entry = msgspec.json.decode(line, type=TraceEntry)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{where}: {error}") from error
    if entry.input_length < 1 or entry.output_length < 0:
        given = f"input_length {entry.input_length} and output_length {entry.output_length}"
        raise UserError(f"{where}: got {given}; allowed: input_length of 1 or more, output_length of 0 or more")
    if len(entry.hash_ids) * BLOCK_LEN < entry.input_length:
        given = f"{entry.input_length} tokens and {len(entry.hash_ids)} hash_ids"
        raise UserError(f"{where}: got {given}; allowed: at least one id for every {BLOCK_LEN} tokens")
    return entry


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
            input_len=max(1, entry.input_length * block_len // BLOCK_LEN),
            output_len=max(1, entry.output_length * block_len // BLOCK_LEN),
            block_len=block_len,
            block_seeds=tuple(f"block {hash_id}" for hash_id in entry.hash_ids),
        )
        for entry in entries
    ]
    lengths = f"lengths x {block_len / BLOCK_LEN:.3g}, speed x {speed:g}"
    title = f"{len(entries)} requests of a trace, {lengths}, {_describe_limit(concurrency)}"
    return Workload(requests=requests, concurrency=concurrency, title=title)


def _check_positive(option: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise UserError(f"{option}: got {value}; allowed: a finite number greater than 0")


def random_tokens(seed: str, count: int) -> list[int]:
    """Return ids of ordinary tokens. Equal seeds yield equal ids."""
    return random.Random(seed).choices(range(FIRST_TOKEN_ID, VOCAB_SIZE), k=count)


def _describe_limit(concurrency: int | None) -> str:
    return f"concurrency {concurrency}" if concurrency else "unlimited concurrency"
