"""Latency and throughput of a benchmark run, from what the client saw of each request."""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cluster.spec.errors import UserError

GOODPUT_METRICS = ("ttft", "tpot", "e2el")


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """Client-side view of one request; times are seconds on one monotonic clock."""

    sent_s: float
    ended_s: float = math.inf
    arrivals_s: list[float] = field(default_factory=list)
    """Arrival time of each chunk that brought tokens."""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens that the endpoint reports as cached."""
    trace_path: str | None = None
    """Path of the request's trace at the endpoint."""
    error: str | None = None
    """Reason of a failure; None for a complete answer."""

    def latencies_s(self) -> dict[str, float]:
        """Return the latencies that this request has, by the names of vLLM's benchmark."""
        latencies = {"e2el": self.ended_s - self.sent_s}
        if self.arrivals_s:
            latencies["ttft"] = self.arrivals_s[0] - self.sent_s
        if self.num_output_tokens > 1:
            # An answer that arrives in one chunk hides the time between its tokens: TPOT is 0.
            latencies["tpot"] = (self.arrivals_s[-1] - self.arrivals_s[0]) / (self.num_output_tokens - 1)
        return latencies


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Mean and percentiles of one latency in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Figures of a run over the requests that succeeded."""

    completed: int
    failed: int
    duration_s: float
    """Time from the first request sent to the last one ended."""
    prompt_tokens: int
    output_tokens: int
    hit_rate: float
    """Share of prompt tokens that the endpoint reports as cached."""
    requests_per_s: float
    goodput_per_s: float | None
    """Requests per second that met every latency objective; None without objectives."""
    output_tokens_per_s: float
    total_tokens_per_s: float
    """Prompt and output tokens per second."""
    ttft_ms: Quantiles | None
    """Time to first token; this and the following are None when no request has the latency."""
    tpot_ms: Quantiles | None
    """Time per output token after the first, one value per request."""
    itl_ms: Quantiles | None
    """Inter-token latency: one value per gap between two chunks of a stream."""
    e2el_ms: Quantiles | None
    """End-to-end latency of a request."""
    errors: dict[str, int]
    """Number of failures by reason."""


def summarize(records: Sequence[RequestRecord], goodput_ms: Mapping[str, float] | None = None) -> Report:
    """Return the figures of a run; ``goodput_ms`` is a limit in milliseconds for some of `GOODPUT_METRICS`.

    Raises:
        ValueError: there are no records.
    """
    if not records:
        raise ValueError("no requests were sent, so there is nothing to report")
    good = [record for record in records if record.error is None]
    latencies = [record.latencies_s() for record in good]
    duration_s = max(record.ended_s for record in records) - min(record.sent_s for record in records)
    prompt_tokens = sum(record.num_prompt_tokens for record in good)
    output_tokens = sum(record.num_output_tokens for record in good)
    gaps_s = [later - earlier for record in good for earlier, later in itertools.pairwise(record.arrivals_s)]
    limits_ms = goodput_ms or {}
    num_in_time = sum(
        all(of_request.get(name, 0.0) * 1000 <= limit for name, limit in limits_ms.items()) for of_request in latencies
    )
    ttft, tpot, e2el = (
        quantiles_ms([each[name] for each in latencies if name in each]) for name in ("ttft", "tpot", "e2el")
    )
    return Report(
        completed=len(good),
        failed=len(records) - len(good),
        duration_s=duration_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        hit_rate=sum(record.num_cached_tokens for record in good) / prompt_tokens if prompt_tokens else 0.0,
        requests_per_s=len(good) / duration_s,
        goodput_per_s=num_in_time / duration_s if limits_ms else None,
        output_tokens_per_s=output_tokens / duration_s,
        total_tokens_per_s=(prompt_tokens + output_tokens) / duration_s,
        ttft_ms=ttft,
        tpot_ms=tpot,
        itl_ms=quantiles_ms(gaps_s),
        e2el_ms=e2el,
        errors=dict(Counter(record.error for record in records if record.error is not None)),
    )


def parse_goodput(text: str) -> dict[str, float]:
    """Return the limits of a text such as ``ttft:500,tpot:50``, in milliseconds by metric."""
    limits_ms: dict[str, float] = {}
    for item in text.split(","):
        name, _, limit = item.strip().partition(":")
        try:
            limits_ms[name] = float(limit)
        except ValueError:
            limits_ms[name] = math.nan
        if name not in GOODPUT_METRICS or not limits_ms[name] > 0:
            metrics = ", ".join(GOODPUT_METRICS)
            raise UserError(f"--goodput: got {item!r}; allowed: METRIC:MILLISECONDS with a metric of {metrics}")
    return limits_ms


def quantiles_ms(values_s: Sequence[float]) -> Quantiles | None:
    """Return mean and percentiles in milliseconds of values in seconds; None for no values."""
    import numpy as np  # not at the start of every command

    if not values_s:
        return None
    values_ms = np.array(values_s) * 1000
    return Quantiles(float(values_ms.mean()), *map(float, np.percentile(values_ms, (50, 90, 99))))
