"""Latency and throughput of a benchmark run, as the client measured them."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """Client-side view of one request; times are seconds on one monotonic clock."""

    sent_s: float
    ended_s: float = math.inf
    arrivals_s: list[float] = field(default_factory=list)
    """Arrival times of the chunks that contained tokens."""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    """Number of prompt tokens that the endpoint reports as cached."""
    trace_path: str | None = None
    """Path of the request's trace at the endpoint."""
    error: str | None = None
    """Reason for the failure; None for a complete answer."""


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Mean and percentiles of one latency in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Metrics of a run, over the requests that succeeded."""

    completed: int
    failed: int
    duration_s: float
    """Time between sending the first request and the end of the last one."""
    prompt_tokens: int
    output_tokens: int
    hit_rate: float
    """Fraction of the prompt tokens that the endpoint reports as cached."""
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    """Prompt and output tokens per second."""
    ttft_ms: Quantiles | None
    """Time to first token. Each of the latencies is None if no request has it."""
    tpot_ms: Quantiles | None
    """Time per output token after the first, one value per request."""
    itl_ms: Quantiles | None
    """Inter-token latency, one value per pair of consecutive chunks."""
    e2el_ms: Quantiles | None
    """End-to-end latency."""
    errors: dict[str, int]
    """Number of failures by reason."""


def summarize(records: Sequence[RequestRecord]) -> Report:
    """Return the metrics of a run of at least one request."""
    good = [record for record in records if record.error is None]
    started = [record for record in good if record.arrivals_s]
    duration_s = max(record.ended_s for record in records) - min(record.sent_s for record in records)
    prompt_tokens = sum(record.num_prompt_tokens for record in good)
    output_tokens = sum(record.num_output_tokens for record in good)
    return Report(
        completed=len(good),
        failed=len(records) - len(good),
        duration_s=duration_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        hit_rate=sum(record.num_cached_tokens for record in good) / max(1, prompt_tokens),
        requests_per_s=len(good) / duration_s,
        output_tokens_per_s=output_tokens / duration_s,
        total_tokens_per_s=(prompt_tokens + output_tokens) / duration_s,
        ttft_ms=_quantiles_ms([record.arrivals_s[0] - record.sent_s for record in started]),
        # An answer that arrives in one chunk hides the time between its tokens: its TPOT is 0.
        tpot_ms=_quantiles_ms(
            [
                (record.arrivals_s[-1] - record.arrivals_s[0]) / (record.num_output_tokens - 1)
                for record in started
                if record.num_output_tokens > 1
            ]
        ),
        itl_ms=_quantiles_ms(
            [later - earlier for record in good for earlier, later in itertools.pairwise(record.arrivals_s)]
        ),
        e2el_ms=_quantiles_ms([record.ended_s - record.sent_s for record in good]),
        errors=dict(Counter(record.error for record in records if record.error is not None)),
    )


def _quantiles_ms(values_s: Sequence[float]) -> Quantiles | None:
    import numpy as np  # would slow down the start of every command

    if not values_s:
        return None
    values_ms = np.array(values_s) * 1000
    return Quantiles(float(values_ms.mean()), *map(float, np.percentile(values_ms, (50, 90, 99))))
