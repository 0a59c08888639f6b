"""What Prometheus may read of one router. Buckets, and names behind the prefix, are vLLM's where it has the same."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster.channel import AsyncInbox
from cluster.spec.clock import Clock
from cluster.spec.lifecycle import Role
from cluster.spec.messages import PhaseTimes
from cluster.spec.tiers import CachedTokens, Tier
from router.breaker import BreakerState
from router.directory import Directory
from router.dispatch import Dispatch
from router.flight import ENDS, Ask
from router.gate import Gate
from router.measures import Count, Measures, Spread, Told, total
from router.page_index import PageIndex
from router.replica_metrics import replica_metrics
from router.tier_metrics import tier_metrics

_SHORT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08)
_TTFT_S = (*_SHORT_S, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_PHASE_S = (0.001, 0.005, 0.01, 0.05, 0.1, *_REQUEST_S)
"""Some phases are over at once."""
_TOKENS = tuple(digit * 10**power for power in range(7) for digit in (1, 2, 5))
_CHOICES = (1, 2, 5, 10, 20)


@dataclass(frozen=True, slots=True)
class Watched:
    """Parts of a router that count for themselves."""

    dispatch: Dispatch
    directory: Directory
    gate: Gate
    pages: PageIndex
    clock: Clock
    inbox: AsyncInbox

    def told(self) -> Told:
        """What they count, but for what every router process sees alike."""
        dispatch, dropped = self.dispatch, self.dispatch.dropped + self.inbox.dropped
        return {
            "num_requests_running": {(): [dispatch.num_open]},
            "num_requests_waiting": {(): [self.gate.num_waiting]},
            "request_retries": {(): [dispatch.num_retries]},
            "request_continuations": {(): [dispatch.num_continuations]},
            "router_page_gaps": {(): [self.pages.num_gaps]},
            "request_ended": {(end.value,): [dispatch.ended[end]] for end in sorted(ENDS, key=lambda end: end.value)},
            "message_dropped": {(why,): [count] for why, count in sorted(dropped.items())},
        }


class Metrics:
    """The measures that are taken as things happen, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._measures = measures = Measures()
        self.registry.register(measures)
        self._watched: Watched | None = None
        self.refused = self._count("request_refused", "HTTP requests answered with an error, by status.", "status")
        self.rejections = self._count(
            "admission_rejections", "HTTP requests answered with 429, by which limit.", "reason"
        )
        self.success = self._count("request_success", "Answers that are whole, by why they ended.", "finished_reason")
        self.prompt_tokens = self._count("prompt_tokens", "Prompt tokens of requests taken.")
        self.cached_tokens = self._count("cached_tokens", "Prompt tokens that prefill took from its cache.")
        self._cache_queries = self._count("prefix_cache_queries", "Prompt tokens that were looked for in a cache.")
        self._cache_hits = self._count("prefix_cache_hits", "Those of them that prefill took from its cache.")
        self.generation_tokens = self._count("generation_tokens", "Tokens generated.")
        self.ttft_s = self._spread("time_to_first_token_seconds", "From the HTTP request to its first token.", _TTFT_S)
        self._cached_by_tier = self._count("cached_tokens_by_tier", "The same by where they were.", "tier")
        self.itl_s = self._spread(
            "inter_token_latency_seconds", "Between tokens of one answer, each batch divided by its tokens.", _TOKEN_S
        )
        self.tpot_s = self._spread(
            "request_time_per_output_token_seconds", "Mean time per token after the first of each answer.", _TOKEN_S
        )
        self.e2e_s = self._spread("e2e_request_latency_seconds", "From the HTTP request to its last token.", _REQUEST_S)
        self.skipped = self._count(
            "prefill_skipped", "Prompts that decode computed itself (prefill.skip_below_tokens)."
        )
        self.queue_s = self._spread(
            "request_queue_time_seconds", "Wait in the router for room at the replicas.", _PHASE_S
        )
        self.decode_s = self._spread(
            "request_decode_time_seconds", "From an answer's first token to its last.", _REQUEST_S
        )
        self._inference_s = self._spread(
            "request_inference_time_seconds", "From when prefill began to an answer's last token.", _REQUEST_S
        )
        self._phases_s = {
            name: self._spread(f"request_{name}_time_seconds", help_text, _PHASE_S, "replica")
            for name, help_text in (
                ("decode_queue", "Wait in decode for pages."),
                ("bootstrap", "Wait in prefill for decode's ticket and ranks."),
                ("prefill", "From then to the first token."),
                ("transfer", "From the first token until all KV was in decode."),
            )
        }
        self.generated = self._spread("request_generation_tokens", "Tokens of each answer.", _TOKENS)
        self._prompts = self._spread("request_prompt_tokens", "Tokens of each prompt.", _TOKENS)
        self._computed = self._spread(
            "request_prefill_kv_computed_tokens", "Tokens of each prompt that no cache had.", _TOKENS
        )
        self._max_tokens = self._spread("request_params_max_tokens", "Most tokens asked for.", _TOKENS)
        self._n = self._spread("request_params_n", "Choices asked for of each prompt of one HTTP request.", _CHOICES)

    def note_cached(self, cached: CachedTokens) -> None:
        """Prefill did not compute these tokens of a prompt."""
        self.cached_tokens.add(cached.total)
        by_tier = {Tier.DEVICE: cached.total - cached.host - cached.storage, Tier.HOST: cached.host}
        for tier, count in {**by_tier, Tier.STORAGE: cached.storage}.items():
            self._cached_by_tier.add(count, tier.value)

    def watch(self, watched: Watched, others: Callable[[], Iterable[Told]] = tuple) -> None:
        """Also report what these count themselves, and what other router processes have told."""
        self._watched = watched
        self._measures.others = others
        self.registry.register(_Counts(watched, others))

    def told(self) -> Told:
        """What this router process has counted, for the others."""
        return self._measures.told() | (self._watched.told() if self._watched is not None else {})

    def exposition(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self.registry)

    def totals(self) -> dict[str, float]:
        """Tokens since the start, for those who look at rates."""
        told = total([self._measures.told(), *self._measures.others()])
        counts = (self.prompt_tokens, self.cached_tokens, self.generation_tokens)
        return {count.name.removeprefix("baton_"): told[count.name][()][0] for count in counts}

    def on_open(self, asks: Sequence[Ask]) -> None:
        """Requests are sent to replicas; those of one prompt share it."""
        self._n.note(len(asks) // sum(not ask.shares_prompt for ask in asks))
        for ask in asks:
            self._max_tokens.note(ask.stopping.max_tokens)
            if not ask.shares_prompt:
                prompt_len = len(ask.prompt_ids)
                self.prompt_tokens.add(prompt_len)
                self._prompts.note(prompt_len)
                self._cache_queries.add(0 if ask.page_keys is None else prompt_len)

    def on_end(self, phases: PhaseTimes | None, decode_s: float) -> None:
        """An answer of at least one token is whole."""
        self.decode_s.note(decode_s)
        if phases is not None:
            self._inference_s.note(phases.prefill_s + decode_s)

    def on_prompt(self, prompt_len: int, num_cached: int) -> None:
        """A prompt is computed, but for what a cache had."""
        self._cache_hits.add(num_cached)
        self._computed.note(prompt_len - num_cached)

    def on_phases(self, phases: PhaseTimes) -> None:
        """The first token of a prompt is there."""
        self._phases_s["decode_queue"].note(phases.decode_queue_s, phases.decode)
        self._phases_s["prefill"].note(phases.prefill_s, phases.prefill or phases.decode)
        if phases.prefill is not None:
            self._phases_s["bootstrap"].note(phases.bootstrap_s, phases.prefill)
            self._phases_s["transfer"].note(phases.transfer_s, phases.decode)

    def _count(self, name: str, help_text: str, *labels: str) -> Count:
        return self._measures.count(f"baton_{name}", help_text, *labels)

    def _spread(self, name: str, help_text: str, bounds: Sequence[float], *labels: str) -> Spread:
        return self._measures.spread(f"baton_{name}", help_text, bounds, *labels)


class _Counts(Collector):
    def __init__(self, watched: Watched, others: Callable[[], Iterable[Told]]) -> None:
        self._watched = watched
        self._others = others

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        watched = self._watched
        yield from _request_metrics(total([watched.told(), *self._others()]))
        yield from _readiness(watched)
        yield GaugeMetricFamily(
            "baton_router_known_pages", "Cached pages of replicas, as told.", value=watched.pages.num_pages
        )
        yield from replica_metrics(watched.directory.snapshot)
        yield from tier_metrics(watched.directory.snapshot)


def _request_metrics(told: Told) -> Iterator[Metric]:
    for name, help_text in (
        ("num_requests_running", "Requests that are open."),
        ("num_requests_waiting", "HTTP requests that wait for room."),
    ):
        yield GaugeMetricFamily(f"baton_{name}", help_text, value=told[name][()][0])
    for name, help_text, *label in (
        ("request_retries", "Attempts that began a request anew after one had failed."),
        ("request_continuations", "Attempts that went on behind the tokens which a client had."),
        ("router_page_gaps", "Times that news of a cache were missing."),
        ("request_ended", "Requests by how they ended.", "outcome"),
        ("message_dropped", "Messages that were not used, by why.", "why"),
    ):
        family = CounterMetricFamily(f"baton_{name}", help_text, labels=label)
        for labels, (count,) in told[name].items():
            family.add_metric(labels, count)
        yield family


def _readiness(watched: Watched) -> Iterator[Metric]:
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
