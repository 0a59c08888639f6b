"""Metrics read at each scrape: the router's state, and the last heartbeats of replicas and ranks."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster.channel import AsyncInbox
from cluster.spec.clock import Clock
from cluster.spec.ids import Role
from cluster.spec.registry import RankRecord, ReplicaEntry, TableSnapshot
from cluster.spec.tiers import JOB_BOUNDS_S, RankTiers, RankWork
from router.admission import Gate
from router.directory import BreakerState, Directory
from router.dispatch import RequestTable
from router.metrics import buckets_of
from router.page_index import PageIndex
from router.request import ENDS

_AXES = ("dp", "tp", "pp", "cp")
_COORDS = tuple(f"{axis}_{what}" for axis in _AXES for what in ("rank", "size"))

Family = type[CounterMetricFamily] | type[GaugeMetricFamily]


@dataclass(frozen=True, slots=True)
class _Source:
    """Part of a heartbeat: label names besides the replica, and a function that yields label values and objects."""

    labels: Sequence[str]
    read: Callable[[ReplicaEntry], Iterable[tuple[Sequence[str], Any]]]


@dataclass(frozen=True, slots=True)
class _Metric:
    family: Family
    name: str
    help_text: str
    source: _Source
    field: str | None = None
    """Attribute of the source's objects; None if they are numbers."""

    def collect(self, entries: Iterable[ReplicaEntry]) -> Metric:
        family = self.family(f"baton_{self.name}", self.help_text, labels=["replica", *self.source.labels])
        for entry in entries:
            for labels, found in self.source.read(entry):
                value = found if self.field is None else getattr(found, self.field)
                family.add_metric([entry.replica, *labels], float(value))
        return family


_counter, _gauge = partial(_Metric, CounterMetricFamily), partial(_Metric, GaugeMetricFamily)


def _by_key(field: str, label: str) -> _Source:
    return _Source(
        (label,), lambda entry: [((str(key),), value) for key, value in sorted(getattr(entry.load, field).items())]
    )


def _by_rank(field: str) -> _Source:
    return _Source(
        ("rank",), lambda entry: [((str(times.global_rank),), times) for times in getattr(entry.load, field)]
    )


def _host_bytes(field: str) -> _Source:
    return _Source(
        _COORDS,
        lambda entry: [(at, getattr(rank, field) * record.layout.page_bytes) for rank, record, at in _ranks(entry)],
    )


def _usage(entry: ReplicaEntry) -> Iterator[tuple[Sequence[str], float]]:
    load = entry.load
    yield (), 1 - load.free_pages / load.total_pages if load.total_pages else 0


def _replica_pages(entry: ReplicaEntry) -> Iterator[tuple[Sequence[str], int]]:
    for state in ("total", "free", "stopping", "quarantined"):
        yield (state,), getattr(entry.load, f"{state}_pages")


def _cache_config(entry: ReplicaEntry) -> Iterator[tuple[Sequence[str], int]]:
    geometry = entry.ranks[0].geometry
    yield (str(geometry.page_size), str(entry.load.total_pages), geometry.dtypes), 1


def _rank_info(entry: ReplicaEntry) -> Iterator[tuple[Sequence[str], int]]:
    for record in entry.ranks:
        coords = record.coords
        yield (str(record.global_rank), *(str(axis) for axis in (coords.dp, coords.cp, coords.tp, coords.pp))), 1


def _open_jobs(entry: ReplicaEntry) -> Iterator[tuple[Sequence[str], int]]:
    for rank, _, at in _ranks(entry):
        for kind, num_open in rank.num_open.items():
            yield (*at, kind.value), num_open


def _moved_tokens(entry: ReplicaEntry) -> Iterator[tuple[Sequence[str], int]]:
    for work, record, at in _jobs(entry):
        yield at, work.num_bytes // record.layout.page_bytes * record.layout.page_size


def _failed_pages(entry: ReplicaEntry) -> Iterator[tuple[Sequence[str], int]]:
    for work, _, at in _jobs(entry):
        for why, count in work.failures.items():
            yield (*at, why), count


def _ranks(entry: ReplicaEntry) -> Iterator[tuple[RankTiers, RankRecord, list[str]]]:
    """Yield each rank's tiers, table record and labels."""
    for rank in entry.load.tiers.ranks if entry.load.tiers else ():
        if rank.global_rank < len(entry.ranks):
            record = entry.ranks[rank.global_rank]
            yield rank, record, _coords(record)


def _jobs(entry: ReplicaEntry) -> Iterator[tuple[RankWork, RankRecord, list[str]]]:
    """Yield each rank's jobs of each kind, table record and labels."""
    for work in entry.load.tiers.work if entry.load.tiers else ():
        if work.global_rank < len(entry.ranks):
            record = entry.ranks[work.global_rank]
            yield work, record, [*_coords(record), work.kind.value]


def _coords(record: RankRecord) -> list[str]:
    return [str(getattr(numbers, axis)) for axis in _AXES for numbers in (record.coords, record.sizes)]


_JOB_LABELS = (*_COORDS, "kind")
_LOAD = _Source((), lambda entry: [((), entry.load)])
_DECODE_LOAD = _Source((), lambda entry: [((), entry.load)] if entry.role is Role.DECODE else [])
_GRAPH_LOAD = _Source((), lambda entry: [((), entry.load)] if entry.load.graph_bytes else [])
_STEPS = _Source(
    ("strategy", "passing"), lambda entry: [((step.strategy, step.passing or ""), step) for step in entry.load.steps]
)
_TIERS = _Source((), lambda entry: [((), entry.load.tiers)] if entry.load.tiers else [])
_STORAGE = _Source(_COORDS, lambda entry: [(at, rank.storage) for rank, _, at in _ranks(entry) if rank.storage])
_JOBS = _Source(_JOB_LABELS, lambda entry: [(at, work) for work, _, at in _jobs(entry)])

_METRICS = (
    _gauge("kv_cache_usage_perc", "Share of pages held by requests, 0 to 1.", _Source((), _usage)),
    _gauge("kv_cached_pages", "Cached pages, held by requests or not.", _LOAD, "cached_pages"),
    _counter("kv_evicted_pages", "Cached pages evicted.", _LOAD, "evicted_pages"),
    _gauge("replica_requests_running", "Requests that hold pages.", _LOAD, "num_running"),
    _gauge("replica_requests_waiting", "Requests waiting for pages.", _LOAD, "num_waiting"),
    _counter("corrupted_requests", "Requests ended by logits that were not finite.", _LOAD, "num_corrupted"),
    _counter("num_preemptions", "Preempted requests.", _LOAD, "num_preempted"),
    _counter("wrong_pages", "Received pages that differ from the sent ones.", _DECODE_LOAD, "wrong_pages"),
    _gauge("replica_pages", "Pages by state.", _Source(("state",), _replica_pages)),
    _counter("replica_message_dropped", "Messages a leader dropped, by type or reason.", _by_key("dropped", "kind")),
    _gauge(
        "cache_config_info",
        "Page size in tokens, number of pages, and KV dtype.",
        _Source(("block_size", "num_gpu_blocks", "cache_dtype"), _cache_config),
    ),
    _gauge("rank_info", "Coordinates of each rank.", _Source(("rank", "dp", "cp", "tp", "pp"), _rank_info)),
    _counter("rank_steps", "Steps computed.", _by_rank("computed"), "num_steps"),
    _counter("rank_step_seconds", "Time in steps, including waits.", _by_rank("computed"), "total_s"),
    _counter("kv_transfer_bytes", "Bytes of KV sent to decode.", _by_rank("sends"), "num_bytes"),
    _counter("kv_transfer_seconds", "Time spent writing KV.", _by_rank("sends"), "write_s"),
    _counter("kv_transfers", "Requests whose KV was sent.", _by_rank("sends"), "num_transfers"),
    _counter("prefill_steps", "Prefill steps.", _STEPS, "num_steps"),
    _counter("prefill_step_tokens", "Tokens computed in prefill steps.", _STEPS, "num_tokens"),
    _counter("prefill_step_seconds", "Time of all prefill steps.", _STEPS, "total_s"),
    _counter("prefill_step_estimate_seconds", "Estimated time of all prefill steps.", _STEPS, "total_estimate_s"),
    _gauge("prefill_last_step_seconds", "Time of the latest step.", _STEPS, "last_s"),
    _gauge("prefill_last_step_estimate_seconds", "Estimated time of the latest step.", _STEPS, "last_estimate_s"),
    _counter("expert_tokens", "Tokens computed by each expert in all layers.", _by_key("expert_tokens", "expert")),
    _counter(
        "decode_graph_steps",
        "Decode steps: replayed, or the reason why not.",
        _by_key("graph_steps", "outcome"),
    ),
    _gauge("decode_graph_bytes", "The leader's GPU memory for captured steps.", _GRAPH_LOAD, "graph_bytes"),
    _gauge("host_pages", "Capacity of host memory in pages.", _TIERS, "host_pages"),
    _gauge("host_used_pages", "Pages in host memory or being copied to it.", _TIERS, "used_host_pages"),
    _gauge("host_pinned_pages", "Pages in host memory that are never evicted.", _TIERS, "num_pinned"),
    _gauge("host_stuck_pages", "Host pages held by hanging storage calls.", _TIERS, "num_stuck"),
    _counter("host_evicted_pages", "Pages evicted from host memory.", _TIERS, "num_evicted"),
    _gauge("tier_waiting_pages", "Pages waiting to be copied to a lower tier.", _TIERS, "num_waiting"),
    _counter("tier_lost_pages", "Pages that could not be copied to a lower tier.", _TIERS, "num_lost"),
    _gauge("storage_attached", "1 while storage is attached.", _TIERS, "is_attached"),
    _counter(
        "storage_late_requests", "Requests that started before storage delivered their pages.", _TIERS, "num_late"
    ),
    _counter("storage_breaks", "Times a storage circuit breaker opened.", _TIERS, "num_opened"),
    _gauge("host_bytes", "Host memory for cached pages in bytes.", _host_bytes("host_pages")),
    _gauge("host_used_bytes", "Host memory in use in bytes.", _host_bytes("used_host_pages")),
    _counter("host_evicted_bytes", "Bytes evicted from host memory.", _host_bytes("num_evicted")),
    _gauge("storage_used_bytes", "Bytes in storage when the rank last checked.", _STORAGE, "used_bytes"),
    _counter("storage_evicted_objects", "Objects the rank evicted from storage.", _STORAGE, "num_evicted"),
    _counter("storage_evicted_bytes", "Bytes the rank evicted from storage.", _STORAGE, "evicted_bytes"),
    _gauge("tier_open_jobs", "Unfinished tier jobs.", _Source(_JOB_LABELS, _open_jobs)),
    _counter("tier_jobs", "Finished tier jobs.", _JOBS, "num_jobs"),
    _counter("tier_bytes", "Bytes moved between tiers.", _JOBS, "num_bytes"),
    _counter("tier_seconds", "Time spent on tier jobs, excluding the queue.", _JOBS, "busy_s"),
    _counter("tier_tokens", "Tokens whose KV was moved between tiers.", _Source(_JOB_LABELS, _moved_tokens)),
    _counter("tier_failures", "Failed pages, by reason.", _Source((*_JOB_LABELS, "reason"), _failed_pages)),
)


@dataclass(frozen=True, eq=False)
class ReplicaMetrics(Collector):
    """Last heartbeats of replicas and ranks, which any thread may collect."""

    snapshot: TableSnapshot | None

    def collect(self) -> Iterator[Metric]:
        entries = self.snapshot.replicas if self.snapshot else ()
        for metric in _METRICS:
            yield metric.collect(entries)
        help_text = "Time of each tier job, including the queue."
        times = HistogramMetricFamily("baton_tier_job_seconds", help_text, labels=["replica", *_JOB_LABELS])
        for entry in entries:
            for work, _, at in _jobs(entry):
                buckets = buckets_of(JOB_BOUNDS_S, work.num_within)
                times.add_metric([entry.replica, *at], buckets, work.waited_s + work.busy_s)
        yield times


@dataclass(frozen=True, eq=False)
class StateMetrics(Collector):
    """State of the router."""

    requests: RequestTable
    directory: Directory
    gate: Gate
    pages: PageIndex
    clock: Clock
    inbox: AsyncInbox

    def collect(self) -> Iterator[Metric]:
        requests, pages = self.requests, self.pages
        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        numbers: Sequence[tuple[Family, str, str, int]] = (
            (gauge, "num_requests_running", "Open requests.", requests.num_open),
            (gauge, "num_requests_waiting", "HTTP requests waiting for capacity.", self.gate.num_waiting),
            (gauge, "router_known_pages", "Replicas' cached pages known to the router.", pages.num_pages),
            (counter, "request_retries", "Attempts that restarted a request.", requests.num_restarts),
            (counter, "request_continuations", "Attempts that continued a stream.", requests.num_continuations),
            (counter, "router_page_gaps", "Gaps in replicas' KV events.", pages.num_gaps),
        )
        for family, name, help_text, value in numbers:
            yield family(f"baton_{name}", help_text, value=value)
        ended = {end.value: requests.ended[end] for end in ENDS}
        yield _labelled("request_ended", "Requests by outcome.", "outcome", ended)
        yield _labelled(
            "message_dropped", "Ignored messages by reason.", "reason", requests.dropped + self.inbox.dropped
        )
        yield from self._readiness()

    def _readiness(self) -> Iterator[Metric]:
        ready = GaugeMetricFamily("baton_ready_replicas", "Replicas that accept requests.", labels=["role"])
        breakers = GaugeMetricFamily(
            "baton_breaker_state", "1 for the state of each replica's circuit breaker.", labels=["replica", "state"]
        )
        for role in Role:
            ready.add_metric([role.value], len(self.directory.ready(role)))
            for peer in self.directory.peers(role):
                now = self.requests.breakers.state(peer, self.clock.now_s())
                for state in BreakerState:
                    breakers.add_metric([peer.replica, state.value], float(state is now))
        yield from (ready, breakers)


def _labelled(name: str, help_text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(f"baton_{name}", help_text, labels=[label])
    for labelled, value in sorted(values.items()):
        family.add_metric([labelled], value)
    return family
