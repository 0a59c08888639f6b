"""What Prometheus may read of one router."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster.spec.clock import Clock
from cluster.spec.lifecycle import Role
from cluster.spec.registry import TableSnapshot
from cluster.spec.tiers import CachedTokens, Tier
from router.breaker import BreakerState
from router.directory import Directory
from router.dispatch import Dispatch
from router.flight import ENDS
from router.gate import Gate
from router.page_index import PageIndex
from router.tier_metrics import tier_metrics

_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280)
_ITL_BUCKETS_S = (0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


@dataclass(frozen=True, slots=True)
class Watched:
    """Parts of a router that count for themselves."""

    dispatch: Dispatch
    directory: Directory
    gate: Gate
    pages: PageIndex
    clock: Clock


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
        self.skipped = Counter(
            "baton_prefill_skipped",
            "Prompts that decode computed itself (prefill.skip_below_tokens).",
            registry=registry,
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

    def watch(self, watched: Watched) -> None:
        """Also report what these count themselves."""
        self.registry.register(_Counts(watched))

    def exposition(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self.registry)


class _Counts(Collector):
    def __init__(self, watched: Watched) -> None:
        self._watched = watched

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        watched = self._watched
        yield from _request_metrics(watched.dispatch, watched.gate)
        yield from _replica_metrics(watched)
        yield GaugeMetricFamily(
            "baton_router_known_pages", "Cached pages of replicas, as told.", value=watched.pages.num_pages
        )
        yield CounterMetricFamily(
            "baton_router_page_gaps", "Times that news of a cache were missing.", watched.pages.num_gaps
        )
        yield _wrong_pages(watched.directory.snapshot)
        yield _retractions(watched.directory.snapshot)
        yield from _step_metrics(watched.directory.snapshot)
        yield from tier_metrics(watched.directory.snapshot)


def _request_metrics(dispatch: Dispatch, gate: Gate) -> Iterator[Metric]:
    yield GaugeMetricFamily("baton_num_requests_running", "Requests that are open.", value=dispatch.num_open)
    yield GaugeMetricFamily("baton_num_requests_waiting", "HTTP requests that wait for room.", value=gate.num_waiting)
    yield CounterMetricFamily(
        "baton_request_retries", "Attempts that began a request anew after one had failed.", dispatch.num_retries
    )
    yield CounterMetricFamily(
        "baton_request_continuations",
        "Attempts that went on behind the tokens which a client had.",
        dispatch.num_continuations,
    )
    ended = CounterMetricFamily("baton_request_ended", "Requests by how they ended.", labels=["outcome"])
    for stage in sorted(ENDS, key=lambda stage: stage.value):
        ended.add_metric([stage.value], dispatch.ended[stage])
    yield ended
    dropped = CounterMetricFamily("baton_message_dropped", "Messages that were not used, by why.", labels=["why"])
    for why, count in sorted(dispatch.dropped.items()):
        dropped.add_metric([why], count)
    yield dropped


def _replica_metrics(watched: Watched) -> Iterator[Metric]:
    ready = GaugeMetricFamily("baton_ready_replicas", "Replicas that take requests.", labels=["role"])
    breakers = GaugeMetricFamily(
        "baton_breaker_state", "1 for the state that the breaker of a replica is in.", labels=["replica", "state"]
    )
    for role in Role:
        ready.add_metric([role.value], len(watched.directory.ready(role)))
        for peer in watched.directory.peers(role):
            now = watched.dispatch.breakers.state(peer, watched.clock.now_s())
            for state in BreakerState:
                breakers.add_metric([peer.replica, state.value], float(state is now))
    yield ready
    yield breakers
    yield from _load_metrics(watched.directory.snapshot)


def _load_metrics(snapshot: TableSnapshot | None) -> Iterator[Metric]:
    """Of every replica in the table, as told by its last heartbeat."""
    pages = GaugeMetricFamily("baton_replica_pages", "Pages of a replica, by state.", labels=["replica", "state"])
    dropped = CounterMetricFamily(
        "baton_replica_message_dropped", "Messages that a leader did not use, by type.", labels=["replica", "kind"]
    )
    for entry in snapshot.replicas if snapshot else ():
        load = entry.load
        counts = {"total": load.total_pages, "free": load.free_pages, "quarantined": load.quarantined_pages}
        for state, count in counts.items():
            pages.add_metric([entry.replica, state], count)
        for kind, count in sorted(load.dropped.items()):
            dropped.add_metric([entry.replica, kind], count)
    yield pages
    yield dropped


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
