"""What Prometheus may read of one router."""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster.spec.lifecycle import Role
from cluster.spec.registry import TableSnapshot
from cluster.spec.tiers import CachedTokens, Tier
from router.directory import Directory
from router.dispatch import Dispatch
from router.flight import ENDS
from router.gate import Gate
from router.page_index import PageIndex
from router.tier_metrics import tier_metrics

_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280)
_ITL_BUCKETS_S = (0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class Metrics:
    """The measures that are taken as things happen, in a registry of their own."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self.registry = registry
        self.refused = Counter(
            "baton_request_refused", "HTTP requests answered with an error, by status.", ["status"], registry=registry
        )
        self.prompt_tokens = Counter("baton_prompt_tokens", "Prompt tokens of requests taken.", registry=registry)
        self.cached_tokens = Counter(
            "baton_cached_tokens", "Prompt tokens that prefill took from its caches.", registry=registry
        )
        self._cached_by_tier = Counter(
            "baton_cached_tokens_by_tier", "The same by where they were.", ["tier"], registry=registry
        )
        self.generation_tokens = Counter("baton_generation_tokens", "Tokens generated.", registry=registry)
        self.ttft_s = Histogram(
            "baton_time_to_first_token_seconds",
            "From the HTTP request to its first token.",
            buckets=_TTFT_BUCKETS_S,
            registry=registry,
        )
        self.itl_s = Histogram(
            "baton_inter_token_latency_seconds",
            "Between the tokens of one answer, each batch divided by its tokens.",
            buckets=_ITL_BUCKETS_S,
            registry=registry,
        )
        self.e2e_s = Histogram(
            "baton_e2e_request_latency_seconds",
            "From the HTTP request to its last token.",
            buckets=_TTFT_BUCKETS_S,
            registry=registry,
        )

    def note_cached(self, cached: CachedTokens) -> None:
        """Prefill did not compute these tokens of a prompt."""
        self.cached_tokens.inc(cached.total)
        by_tier = {Tier.DEVICE: cached.total - cached.host - cached.storage, Tier.HOST: cached.host}
        for tier, count in {**by_tier, Tier.STORAGE: cached.storage}.items():
            self._cached_by_tier.labels(tier).inc(count)

    def watch(self, dispatch: Dispatch, directory: Directory, gate: Gate, pages: PageIndex) -> None:
        """Also report what these count themselves."""
        self.registry.register(_Counts(dispatch, directory, gate, pages))

    def exposition(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self.registry)


class _Counts(Collector):
    def __init__(self, dispatch: Dispatch, directory: Directory, gate: Gate, pages: PageIndex) -> None:
        self._dispatch = dispatch
        self._gate = gate
        self._pages = pages
        self._directory = directory

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("baton_num_requests_running", "Requests that are open.", value=self._dispatch.num_open)
        yield GaugeMetricFamily(
            "baton_num_requests_waiting", "HTTP requests that wait for room.", value=self._gate.num_waiting
        )
        ended = CounterMetricFamily("baton_request_ended", "Requests by how they ended.", labels=["outcome"])
        for stage in sorted(ENDS, key=lambda stage: stage.value):
            ended.add_metric([stage.value], self._dispatch.ended[stage])
        yield ended
        dropped = CounterMetricFamily("baton_message_dropped", "Messages that were not used, by why.", labels=["why"])
        for why, count in sorted(self._dispatch.dropped.items()):
            dropped.add_metric([why], count)
        yield dropped
        ready = GaugeMetricFamily("baton_ready_replicas", "Replicas that take requests.", labels=["role"])
        for role in Role:
            ready.add_metric([role.value], len(self._directory.ready(role)))
        yield ready
        pages = self._pages
        yield GaugeMetricFamily("baton_router_known_pages", "Cached pages of replicas, as told.", value=pages.num_pages)
        yield CounterMetricFamily("baton_router_page_gaps", "Times that news of a cache were missing.", pages.num_gaps)
        yield _wrong_pages(self._directory.snapshot)
        yield _retractions(self._directory.snapshot)
        yield _graph_metric(self._directory.snapshot)
        yield from _step_metrics(self._directory.snapshot)
        yield from tier_metrics(self._directory.snapshot)


def _wrong_pages(snapshot: TableSnapshot | None) -> Metric:
    wrong = CounterMetricFamily(
        "baton_wrong_pages", "Pages of KV that were not as they were sent, by who got them.", labels=["replica"]
    )
    for entry in snapshot.replicas if snapshot else ():
        if entry.role is Role.DECODE:
            wrong.add_metric([entry.replica], entry.load.wrong_pages)
    return wrong


def _retractions(snapshot: TableSnapshot | None) -> Metric:
    """Of every replica in the table, as told by its last heartbeat."""
    metric = CounterMetricFamily(
        "baton_retractions",
        "Times that requests gave their pages back, by what became of the KV.",
        labels=["replica", "kv"],
    )
    for entry in snapshot.replicas if snapshot else ():
        metric.add_metric([entry.replica, "kept"], entry.load.num_kept)
        metric.add_metric([entry.replica, "computed_again"], entry.load.num_retracted - entry.load.num_kept)
    return metric


def _graph_metric(snapshot: TableSnapshot | None) -> Metric:
    metric = CounterMetricFamily(
        "baton_decode_graph_steps",
        "Decode steps on GPUs, replayed from CUDA graphs or not, and why not.",
        labels=["replica", "way"],
    )
    for entry in snapshot.replicas if snapshot else ():
        for way, num_steps in entry.load.graph_steps.items():
            metric.add_metric([entry.replica, way], num_steps)
    return metric


def _step_metrics(snapshot: TableSnapshot | None) -> list[Metric]:
    """The prefill steps of every replica in the table, as told by its last heartbeat."""
    labels = ["replica", "strategy", "passing"]
    metrics: dict[str, CounterMetricFamily | GaugeMetricFamily] = {
        "num_steps": CounterMetricFamily("baton_prefill_steps", "Prefill steps computed.", labels=labels),
        "num_tokens": CounterMetricFamily(
            "baton_prefill_step_tokens", "Tokens computed in prefill steps.", labels=labels
        ),
        "total_s": CounterMetricFamily("baton_prefill_step_seconds", "Time of all prefill steps.", labels=labels),
        "total_estimate_s": CounterMetricFamily(
            "baton_prefill_step_estimate_seconds",
            "Time expected of all prefill steps when their strategy was chosen.",
            labels=labels,
        ),
        "last_s": GaugeMetricFamily("baton_prefill_last_step_seconds", "Time of the newest step.", labels=labels),
        "last_estimate_s": GaugeMetricFamily(
            "baton_prefill_last_step_estimate_seconds", "Time expected of the newest step.", labels=labels
        ),
    }
    for entry in snapshot.replicas if snapshot else ():
        for times in entry.load.steps:
            for name, metric in metrics.items():
                metric.add_metric([entry.replica, times.strategy, times.passing or ""], getattr(times, name))
    return list(metrics.values())
