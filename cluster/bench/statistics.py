"""From what was seen of each request to the figures of a run. Pure arithmetic; all times in, milliseconds out."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """What the client saw of one request; times are seconds on one monotonic clock."""

    sent_s: float
    ended_s: float
    arrivals_s: tuple[float, ...] = ()
    """When each piece of the answer came."""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens that the endpoint took from a cache, as it says."""
    timeline_path: str | None = None
    """Where the endpoint has the request's timeline."""
    error: str | None = None
    """Why it failed; None when the whole answer came."""


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Of one latency, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The figures of a run; only requests that succeeded count, and failures are counted apart."""

    completed: int
    failed: int
    duration_s: float
    """From the first request sent to the last one ended."""
    prompt_tokens: int
    output_tokens: int
    hit_rate: float
    """Part of the prompt tokens that the endpoint took from a cache, as it says."""
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    """Prompt and output tokens together."""
    ttft_ms: Quantiles | None
    """Time to first token. None here and below when no request has such a time."""
    tpot_ms: Quantiles | None
    """Time per output token after the first, one value a request."""
    itl_ms: Quantiles | None
    """Time between two pieces of one stream, one value a gap."""
    e2e_ms: Quantiles | None
    """From sending a request to its end."""
    errors: dict[str, int] = field(default_factory=dict)
    """How often each failure was seen."""


def summarize(records: Sequence[RequestRecord]) -> Report:
    """The report of a run.

    Raises:
        ValueError: there are no records.
    """
    if not records:
        raise ValueError("no requests were sent, so there is nothing to report")
    good = [record for record in records if record.error is None]
    duration_s = max(record.ended_s for record in records) - min(record.sent_s for record in records)
    prompt_tokens = sum(record.num_prompt_tokens for record in good)
    output_tokens = sum(record.num_output_tokens for record in good)
    gaps_s = [later - earlier for record in good for earlier, later in itertools.pairwise(record.arrivals_s)]
    return Report(
        completed=len(good),
        failed=len(records) - len(good),
        duration_s=duration_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        hit_rate=sum(record.num_cached_tokens for record in good) / prompt_tokens if prompt_tokens else 0.0,
        requests_per_s=_rate(len(good), duration_s),
        output_tokens_per_s=_rate(output_tokens, duration_s),
        total_tokens_per_s=_rate(prompt_tokens + output_tokens, duration_s),
        ttft_ms=quantiles_ms([record.arrivals_s[0] - record.sent_s for record in good if record.arrivals_s]),
        tpot_ms=quantiles_ms([_time_per_token_s(record) for record in good if record.num_output_tokens > 1]),
        itl_ms=quantiles_ms(gaps_s),
        e2e_ms=quantiles_ms([record.ended_s - record.sent_s for record in good]),
        errors=dict(Counter(record.error for record in records if record.error is not None)),
    )


def quantiles_ms(values_s: Sequence[float]) -> Quantiles | None:
    """Mean and quantiles in milliseconds of values in seconds; None of an empty sequence."""
    if not values_s:
        return None
    ordered_ms = sorted(value * 1000 for value in values_s)
    return Quantiles(
        mean=math.fsum(ordered_ms) / len(ordered_ms),
        p50=_quantile(ordered_ms, 0.50),
        p90=_quantile(ordered_ms, 0.90),
        p99=_quantile(ordered_ms, 0.99),
    )


def _quantile(ordered: Sequence[float], fraction: float) -> float:
    # Linear between the two neighbours, as numpy's default.
    position = fraction * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _time_per_token_s(record: RequestRecord) -> float:
    # With one piece for the whole answer the time from the first token to the last cannot be seen: it is 0.
    return (record.arrivals_s[-1] - record.arrivals_s[0]) / (record.num_output_tokens - 1)


def _rate(count: int, duration_s: float) -> float:
    return count / duration_s if duration_s > 0 else 0.0
