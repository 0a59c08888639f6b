"""Metrics read when Prometheus asks: of this router, and of replicas, ranks and tiers by their last heartbeats."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from cluster.channel import AsyncInbox
from cluster.spec.clock import Clock
from cluster.spec.ids import Role
from cluster.spec.registry import RankRow, ReplicaEntry, TableSnapshot
from cluster.spec.tiers import JOB_BOUNDS_S, RankTiers, RankWork
from router.admission import Gate
from router.directory import BreakerState, Directory
from router.dispatch import RequestTable
from router.page_index import PageIndex
from router.request import ENDS

Samples = Iterable[tuple[Sequence[str], float]]
"""Values of one replica, each with its labels besides the replica."""
Read = Callable[[ReplicaEntry], Samples]

_AXES = ("dp", "tp", "pp", "cp")
_PLACE = tuple(f"{axis}_{what}" for axis in _AXES for what in ("rank", "size"))
_JOB = (*_PLACE, "kind")
_STEP = ("strategy", "passing")
_KV = ("block_size", "num_gpu_blocks", "cache_dtype")


@dataclass(frozen=True, slots=True)
class _Metric:
    family: type[CounterMetricFamily] | type[GaugeMetricFamily]
    name: str
    help_text: str
    read: Read
    labels: Sequence[str]

    def collect(self, entries: Iterable[ReplicaEntry]) -> Metric:
        family = self.family(f"baton_{self.name}", self.help_text, labels=["replica", *self.labels])
        for entry in entries:
            for labels, value in self.read(entry):
                family.add_metric([entry.replica, *labels], value)
        return family


def _counter(name: str, help_text: str, read: Read, *labels: str) -> _Metric:
    return _Metric(CounterMetricFamily, name, help_text, read, labels)


def _gauge(name: str, help_text: str, read: Read, *labels: str) -> _Metric:
    return _Metric(GaugeMetricFamily, name, help_text, read, labels)


def _load(field: str) -> Read:
    return lambda entry: [((), getattr(entry.load, field))]


def _by_key(field: str) -> Read:
    return lambda entry: [((str(key),), value) for key, value in sorted(getattr(entry.load, field).items())]


def _by_rank(times: str, field: str) -> Read:
    return lambda entry: [((str(rank.global_rank),), getattr(rank, field)) for rank in getattr(entry.load, times)]


def _by_step(field: str) -> Read:
    return lambda entry: [((times.strategy, times.passing or ""), getattr(times, field)) for times in entry.load.steps]


def _tiers(field: str) -> Read:
    return lambda entry: [((), float(getattr(entry.load.tiers, field)))] if entry.load.tiers else []


def _host_bytes(field: str) -> Read:
    return lambda entry: [(at, getattr(rank, field) * row.layout.page_bytes) for rank, row, at in _ranks(entry)]


def _storage(field: str) -> Read:
    return lambda entry: [(at, getattr(rank.storage, field)) for rank, _, at in _ranks(entry) if rank.storage]


def _job(field: str) -> Read:
    return lambda entry: [(at, getattr(work, field)) for work, _, at in _jobs(entry)]


def _replica_pages(entry: ReplicaEntry) -> Samples:
    for state in ("total", "free", "stopping", "quarantined"):
        yield (state,), getattr(entry.load, f"{state}_pages")


def _usage(entry: ReplicaEntry) -> Samples:
    load = entry.load
    return [((), 1 - load.free_pages / load.total_pages if load.total_pages else 0)]


def _cache_config(entry: ReplicaEntry) -> Samples:
    geometry = entry.rows[0].geometry
    return [((str(geometry.page_size), str(entry.load.total_pages), geometry.dtypes), 1)]


def _rank_info(entry: ReplicaEntry) -> Samples:
    for row in entry.rows:
        coords = row.coords
        yield (str(row.global_rank), *(str(axis) for axis in (coords.dp, coords.cp, coords.tp, coords.pp))), 1


def _wrong_pages(entry: ReplicaEntry) -> Samples:
    return [((), entry.load.wrong_pages)] if entry.role is Role.DECODE else []


def _graph_bytes(entry: ReplicaEntry) -> Samples:
    return [((), entry.load.graph_bytes)] if entry.load.graph_bytes else []


def _open_jobs(entry: ReplicaEntry) -> Samples:
    for rank, _, at in _ranks(entry):
        for kind, num_open in rank.num_open.items():
            yield (*at, kind.value), num_open


def _moved_tokens(entry: ReplicaEntry) -> Samples:
    for work, row, at in _jobs(entry):
        yield at, work.num_bytes // row.layout.page_bytes * row.layout.page_size


def _failed_pages(entry: ReplicaEntry) -> Samples:
    for work, _, at in _jobs(entry):
        for why, count in work.failures.items():
            yield (*at, why), count


def _ranks(entry: ReplicaEntry) -> Iterator[tuple[RankTiers, RankRow, list[str]]]:
    """Yield the tiers of each rank with its row in the table and its labels."""
    for rank in entry.load.tiers.ranks if entry.load.tiers else ():
        if rank.global_rank < len(entry.rows):
            row = entry.rows[rank.global_rank]
            yield rank, row, _place(row)


def _jobs(entry: ReplicaEntry) -> Iterator[tuple[RankWork, RankRow, list[str]]]:
    """Yield the jobs of each rank and kind, with the rank's row in the table and the labels."""
    for work in entry.load.tiers.work if entry.load.tiers else ():
        if work.global_rank < len(entry.rows):
            row = entry.rows[work.global_rank]
            yield work, row, [*_place(row), work.kind.value]


def _place(row: RankRow) -> list[str]:
    return [str(getattr(numbers, axis)) for axis in _AXES for numbers in (row.coords, row.sizes)]


def _job_seconds(entries: Iterable[ReplicaEntry]) -> Metric:
    times = HistogramMetricFamily(
        "baton_tier_job_seconds", "Time of a tier job, queue and work.", labels=["replica", *_JOB]
    )
    ends = [*map(floatToGoString, JOB_BOUNDS_S), "+Inf"]
    for entry in entries:
        for work, _, at in _jobs(entry):
            buckets = [*zip(ends, accumulate(work.num_within), strict=True)]
            times.add_metric([entry.replica, *at], buckets, work.waited_s + work.busy_s)
    return times


_METRICS = (
    _gauge("kv_cache_usage_perc", "Share of the pages that requests hold.", _usage),
    _gauge("kv_cached_pages", "Cached pages, held by requests or not.", _load("cached_pages")),
    _counter("kv_evicted_pages", "Evicted cached pages.", _load("evicted_pages")),
    _gauge("replica_requests_running", "Requests that hold pages.", _load("num_running")),
    _gauge("replica_requests_waiting", "Requests that wait for pages.", _load("num_waiting")),
    _counter("num_preemptions", "Times that a request gave its pages back.", _load("num_preempted")),
    _counter("wrong_pages", "Pages that differ from what was sent, by receiver.", _wrong_pages),
    _gauge("replica_pages", "Pages of a replica, by state.", _replica_pages, "state"),
    _counter(
        "replica_message_dropped", "Messages that a leader dropped, by type or reason.", _by_key("dropped"), "kind"
    ),
    _gauge("cache_config_info", "Page size in tokens, pages, and KV dtype.", _cache_config, *_KV),
    _gauge("rank_info", "Ranks and their coordinates.", _rank_info, "rank", "dp", "cp", "tp", "pp"),
    _counter("rank_steps", "Steps computed by a rank.", _by_rank("computed", "num_steps"), "rank"),
    _counter("rank_step_seconds", "Time in steps, waits included.", _by_rank("computed", "total_s"), "rank"),
    _counter("kv_transfer_bytes", "Bytes of KV sent to decode.", _by_rank("sends", "num_bytes"), "rank"),
    _counter("kv_transfer_seconds", "Time of writing KV.", _by_rank("sends", "write_s"), "rank"),
    _counter("kv_transfers", "Requests whose KV was sent.", _by_rank("sends", "num_transfers"), "rank"),
    _counter("prefill_steps", "Prefill steps.", _by_step("num_steps"), *_STEP),
    _counter("prefill_step_tokens", "Tokens computed in prefill steps.", _by_step("num_tokens"), *_STEP),
    _counter("prefill_step_seconds", "Time of all prefill steps.", _by_step("total_s"), *_STEP),
    _counter("prefill_step_estimate_seconds", "Estimated time of prefill steps.", _by_step("total_estimate_s"), *_STEP),
    _gauge("prefill_last_step_seconds", "Time of the newest step.", _by_step("last_s"), *_STEP),
    _gauge(
        "prefill_last_step_estimate_seconds", "Estimated time of the newest step.", _by_step("last_estimate_s"), *_STEP
    ),
    _counter("expert_tokens", "Tokens computed by each expert, over all layers.", _by_key("expert_tokens"), "expert"),
    _counter("decode_graph_steps", "Decode steps on GPUs: replayed, or why not.", _by_key("graph_steps"), "way"),
    _gauge("decode_graph_bytes", "GPU memory of captured decode steps, on the leader.", _graph_bytes),
    _gauge("host_pages", "Pages that host memory has room for.", _tiers("host_pages")),
    _gauge("host_used_pages", "Pages in host memory, or on their way there.", _tiers("used_host_pages")),
    _gauge("host_pinned_pages", "Pages in host memory that are never evicted.", _tiers("num_pinned")),
    _gauge("host_stuck_pages", "Host pages of storage calls that hang.", _tiers("num_stuck")),
    _counter("host_evicted_pages", "Evicted host pages.", _tiers("num_evicted")),
    _gauge("tier_waiting_pages", "Pages that wait to be copied to a lower tier.", _tiers("num_waiting")),
    _counter("tier_lost_pages", "Pages due to be copied to a lower tier that were not.", _tiers("num_lost")),
    _gauge("storage_attached", "Whether storage is used.", _tiers("is_attached")),
    _counter("storage_late_requests", "Requests that started before storage delivered.", _tiers("num_late")),
    _counter("storage_breaks", "Times that a storage circuit breaker opened.", _tiers("num_opened")),
    _gauge("host_bytes", "Host memory for cached pages, in bytes.", _host_bytes("host_pages"), *_PLACE),
    _gauge("host_used_bytes", "Host memory in use, in bytes.", _host_bytes("used_host_pages"), *_PLACE),
    _counter("host_evicted_bytes", "Bytes evicted from host memory.", _host_bytes("num_evicted"), *_PLACE),
    _gauge("storage_used_bytes", "Bytes in storage, as this rank last saw it.", _storage("used_bytes"), *_PLACE),
    _counter("storage_evicted_objects", "Objects that a rank evicted from storage.", _storage("num_evicted"), *_PLACE),
    _counter("storage_evicted_bytes", "Bytes that a rank evicted from storage.", _storage("evicted_bytes"), *_PLACE),
    _gauge("tier_open_jobs", "Tier jobs not done yet.", _open_jobs, *_JOB),
    _counter("tier_jobs", "Tier jobs done.", _job("num_jobs"), *_JOB),
    _counter("tier_bytes", "Bytes moved between tiers.", _job("num_bytes"), *_JOB),
    _counter("tier_seconds", "Time spent on tier jobs, without the queue.", _job("busy_s"), *_JOB),
    _counter("tier_tokens", "Tokens whose KV was moved between tiers.", _moved_tokens, *_JOB),
    _counter("tier_failures", "Failed pages, by reason.", _failed_pages, *_JOB, "why"),
)


def replica_metrics(snapshot: TableSnapshot | None) -> Iterator[Metric]:
    entries = snapshot.replicas if snapshot else ()
    for metric in _METRICS:
        yield metric.collect(entries)
    yield _job_seconds(entries)


@dataclass(frozen=True, eq=False)
class StateMetrics(Collector):
    requests: RequestTable
    directory: Directory
    gate: Gate
    pages: PageIndex
    clock: Clock
    inbox: AsyncInbox

    def collect(self) -> Iterator[Metric]:
        requests, dropped = self.requests, self.requests.dropped + self.inbox.dropped
        ended = {end.value: requests.ended[end] for end in ENDS}
        yield GaugeMetricFamily("baton_num_requests_running", "Open requests.", value=requests.num_open)
        yield GaugeMetricFamily(
            "baton_num_requests_waiting", "HTTP requests that wait for room.", value=self.gate.num_waiting
        )
        yield GaugeMetricFamily(
            "baton_router_known_pages", "Cached pages that replicas have reported.", value=self.pages.num_pages
        )
        yield CounterMetricFamily(
            "baton_request_retries", "Attempts that began a request anew after a failure.", value=requests.num_retries
        )
        yield CounterMetricFamily(
            "baton_request_continuations", "Attempts that continued a stream.", value=requests.num_continuations
        )
        yield CounterMetricFamily(
            "baton_router_page_gaps", "Times that a replica's page reports were missing.", value=self.pages.num_gaps
        )
        yield _labelled("request_ended", "Requests by outcome.", "outcome", ended)
        yield _labelled("message_dropped", "Unused messages, by reason.", "why", dropped)
        yield from self._readiness()
        yield from replica_metrics(self.directory.snapshot)

    def _readiness(self) -> Iterator[Metric]:
        ready = GaugeMetricFamily("baton_ready_replicas", "Replicas that take requests.", labels=["role"])
        breakers = GaugeMetricFamily(
            "baton_breaker_state", "1 for the state of each replica's breaker.", labels=["replica", "state"]
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
