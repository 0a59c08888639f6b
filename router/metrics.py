"""Metrics recorded as events happen. Metrics that vLLM also has use vLLM's names and buckets.

Counters and histograms are our own because prometheus_client takes a lock for each of the many updates per token.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from cluster.spec.phases import PhaseTimes
from cluster.spec.tiers import CachedTokens, Tier
from router.phases import Phase, totals_of
from router.request import GenerateRequest

Labels = tuple[str, ...]

_SHORT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08)
_TTFT_S = (*_SHORT_S, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_PHASE_S = (0.001, 0.005, 0.01, 0.05, 0.1, *_REQUEST_S)
_TOKENS = tuple(digit * 10**power for power in range(7) for digit in (1, 2, 5))
_CHOICES = (1, 2, 5, 10, 20)
_DIFFERENCES = (1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)
_PHASE_TEXTS = (
    ("decode_queue", "Time waiting for pages in decode."),
    ("bootstrap", "Time waiting in prefill for decode's ticket and ranks."),
    ("storage", "Time waiting in prefill for pages from storage."),
    ("prefill_queue", "Time waiting in prefill for steps."),
    ("prefill", "Time from the first wait for a step to the first token."),
    ("communication", "Part of prefill's steps spent in collectives."),
    ("transfer", "Time from the first token until decode has all KV."),
    ("delivery", "Time of the first token from decode to the router."),
)
"""Phases of a prompt with a histogram each, and their descriptions."""
_PHASES_IN_DECODE = {"decode_queue": False, "prefill_queue": True, "communication": True, "delivery": False}
"""Phases of a prompt that decode computes itself; True for those at the replica that computes the prompt."""
_PHASES = {**_PHASES_IN_DECODE, "bootstrap": True, "storage": True, "transfer": False}


class Counter:
    """A counter for every combination of labels."""

    def __init__(self, name: str, help_text: str, *labels: str) -> None:
        self.name = name
        self._help_text = help_text
        self._labels = labels
        self.values: dict[Labels, float] = {} if labels else {(): 0}

    def add(self, amount: float, *labels: str) -> None:
        self.values[labels] = self.values.get(labels, 0) + amount

    def family(self) -> Metric:
        family = CounterMetricFamily(self.name, self._help_text, labels=self._labels)
        for labels, value in self.values.items():
            family.add_metric(labels, value)
        return family


class Histogram:
    """A histogram for every combination of labels."""

    def __init__(self, name: str, help_text: str, bounds: Sequence[float], *labels: str) -> None:
        """Create an empty histogram; ``bounds`` are the upper bounds of all buckets but the last, unbounded one."""
        self.name = name
        self._help_text = help_text
        self._labels = labels
        self._bounds = [*bounds]
        self.values: dict[Labels, list[float]] = {} if labels else {(): self._empty()}
        """Count of each bucket, followed by the sum of all values."""

    def observe(self, value: float, *labels: str) -> None:
        line = self.values.get(labels)
        if line is None:
            line = self.values[labels] = self._empty()
        line[bisect_left(self._bounds, value)] += 1
        line[-1] += value

    def counts(self) -> dict[str, list[float]]:
        """Return the upper bounds of the buckets, and how many values of all labels are in each, the last unbounded."""
        counts = [sum(line[index] for line in self.values.values()) for index in range(len(self._bounds) + 1)]
        return {"bounds": self._bounds, "counts": counts}

    def family(self) -> Metric:
        family = HistogramMetricFamily(self.name, self._help_text, labels=self._labels)
        for labels, (*counts, total) in self.values.items():
            family.add_metric(labels, buckets_of(self._bounds, counts), total)
        return family

    def _empty(self) -> list[float]:
        return [0] * (len(self._bounds) + 2)


def buckets_of(bounds: Sequence[float], counts: Iterable[float]) -> list[tuple[str, float]]:
    """Return Prometheus' cumulative buckets: the count of values up to each bound, and the total."""
    return [*zip([*map(floatToGoString, bounds), "+Inf"], accumulate(counts), strict=True)]


class Metrics(Collector):
    """The counters and histograms of one router process, in their own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._all: list[Counter | Histogram] = []
        count, histogram = self._count, self._histogram
        self.refused = count("request_refused", "HTTP requests answered with an error, by status.", "status")
        self.rejections = count("admission_rejections", "HTTP requests answered with 429, by limit.", "reason")
        self.success = count("request_success", "Complete answers, by finish reason.", "finished_reason")
        self.prompt_tokens = count("prompt_tokens", "Prompt tokens of admitted requests.")
        self.cached_tokens = count("cached_tokens", "Prompt tokens found in a cache.")
        self._cached_by_tier = count("cached_tokens_by_tier", "Cached prompt tokens, by tier.", "tier")
        self._cache_queries = count("prefix_cache_queries", "Prompt tokens looked up in a cache.")
        self._cache_hits = count("prefix_cache_hits", "Looked-up prompt tokens found in a cache.")
        self._cache_known = count("prefix_cache_known", "Prompt tokens that the router expected in a cache.")
        self._cache_missed = count("prefix_cache_missed", "Looked-up prompt tokens that prefill computed.", "reason")
        self.generation_tokens = count("generation_tokens", "Generated tokens.")
        self.skipped = count("prefill_skipped", "Prompts computed by decode (prefill.skip_below_tokens).")
        self.parity_probes = count("parity_probes", "Parity probes (router.parity_probe_s), by result.", "result")
        self.parity_difference = histogram(
            "parity_probe_max_difference",
            "Largest difference between log-probabilities in each parity probe, in nats.",
            _DIFFERENCES,
        )
        self.ttft_s = histogram(
            "time_to_first_token_seconds", "Time from the HTTP request to its first token.", _TTFT_S
        )
        self.itl_s = histogram(
            "inter_token_latency_seconds",
            "Time between an answer's tokens; tokens that arrive together share it equally.",
            _TOKEN_S,
        )
        self.tpot_s = histogram(
            "request_time_per_output_token_seconds", "Each answer's mean time per token after the first.", _TOKEN_S
        )
        self.e2e_s = histogram(
            "e2e_request_latency_seconds", "Time from the HTTP request to its last token.", _REQUEST_S
        )
        self.preprocess_s = histogram(
            "request_preprocess_time_seconds", "Time from an HTTP request's head to its tokens.", _PHASE_S
        )
        self.queue_s = histogram("request_queue_time_seconds", "Time waiting in the router for capacity.", _PHASE_S)
        self.decode_s = histogram(
            "request_decode_time_seconds", "Time from an answer's first token to its last.", _REQUEST_S
        )
        self._inference_s = histogram(
            "request_inference_time_seconds", "Time from the start of prefill to the last token.", _REQUEST_S
        )
        self._phases_s = {
            name: histogram(f"request_{name}_time_seconds", help_text, _PHASE_S, "replica")
            for name, help_text in _PHASE_TEXTS
        }
        self.generated = histogram("request_generation_tokens", "Tokens per answer.", _TOKENS)
        self._prompts = histogram("request_prompt_tokens", "Tokens per prompt.", _TOKENS)
        self._computed = histogram("request_prefill_kv_computed_tokens", "Uncached tokens per prompt.", _TOKENS)
        self._max_tokens = histogram("request_params_max_tokens", "max_tokens per request.", _TOKENS)
        self._n = histogram("request_params_n", "Choices per prompt (n) of each HTTP request.", _CHOICES)

        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        return (measure.family() for measure in self._all)

    def _count(self, name: str, help_text: str, *labels: str) -> Counter:
        self._all.append(made := Counter(f"baton_{name}", help_text, *labels))
        return made

    def _histogram(self, name: str, help_text: str, bounds: Sequence[float], *labels: str) -> Histogram:
        self._all.append(made := Histogram(f"baton_{name}", help_text, bounds, *labels))
        return made

    def totals(self) -> dict[str, float]:
        """Return counts since startup for the status page, which computes rates from those of tokens."""
        counts = (self.prompt_tokens, self.cached_tokens, self.generation_tokens)
        tokens = {count.name.removeprefix("baton_"): count.values[()] for count in counts}
        return tokens | {"parity_mismatches": self.parity_probes.values.get(("mismatch",), 0)}

    def on_cached(self, cached: CachedTokens) -> None:
        self.cached_tokens.add(cached.total)
        by_tier = {Tier.DEVICE: cached.total - cached.host - cached.storage, Tier.HOST: cached.host}
        for tier, count in {**by_tier, Tier.STORAGE: cached.storage}.items():
            self._cached_by_tier.add(count, tier.value)

    def on_open(self, requests: Sequence[GenerateRequest]) -> None:
        """Count the choices of one HTTP request."""
        self._n.observe(len(requests) // sum(not request.shares_prompt for request in requests))
        for request in requests:
            self._max_tokens.observe(request.stopping.max_tokens)
            if not request.shares_prompt:
                prompt_len = len(request.prompt_ids)
                self.prompt_tokens.add(prompt_len)
                self._prompts.observe(prompt_len)
                self._cache_queries.add(0 if request.page_keys is None else prompt_len)

    def on_prompt(self, request: GenerateRequest, num_cached: int) -> None:
        """Count a prompt's cached tokens, those that the router knew, and why the others were computed."""
        num_computed, known = len(request.prompt_ids) - num_cached, request.known
        self._computed.observe(num_computed)
        self._cache_hits.add(num_cached)
        self._cache_known.add(known.total)
        if request.page_keys is not None:
            num_lost = max(known.total - num_cached, 0)
            num_evicted = max(known.in_memory - num_cached, 0)
            reasons = {"unknown": num_computed - num_lost, "evicted": num_evicted, "storage": num_lost - num_evicted}
            for reason, count in reasons.items():
                self._cache_missed.add(count, reason)

    def on_phases(self, times: PhaseTimes, phases: Iterable[Phase]) -> None:
        """Count the phases of one prompt. Waits in prefill and transfers exist only if prefill computed it."""
        totals, prompt = totals_of(phases), times.prompt
        self._phases_s["prefill"].observe(prompt.seconds, prompt.replica)
        names = _PHASES if times.prefill is not None else _PHASES_IN_DECODE
        for name, is_of_prompt in names.items():
            replica = prompt.replica if is_of_prompt else times.decode
            self._phases_s[name].observe(totals.get(name.replace("_", "-"), 0.0), replica)

    def on_end(self, prompt_s: float | None, decode_s: float) -> None:
        """Count a choice's end; ``prompt_s`` is the time of its prompt's computation, if it is known."""
        self.decode_s.observe(decode_s)
        if prompt_s is not None:
            self._inference_s.observe(prompt_s + decode_s)
