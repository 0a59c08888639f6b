"""Metrics of the tiers below the device caches, from heartbeats."""

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from cluster.spec.registry import RankRow, ReplicaEntry, TableSnapshot
from cluster.spec.tiers import JOB_BOUNDS_S, TierState

_AXES = ("dp", "tp", "pp", "cp")
_RANK_LABELS = ["replica", *(f"{axis}_{what}" for axis in _AXES for what in ("rank", "size"))]
_JOB_LABELS = [*_RANK_LABELS, "kind"]
_ENDS = [*map(floatToGoString, JOB_BOUNDS_S), "+Inf"]


def tier_metrics(snapshot: TableSnapshot | None) -> Iterator[Metric]:
    """Yield the metrics of every replica in the table that has such tiers."""
    entries = [entry for entry in snapshot.replicas if entry.load.tiers is not None] if snapshot else []
    yield from _states(entries)
    yield from _ranks(entries)
    yield from _work(entries)


def _states(entries: list[ReplicaEntry]) -> Iterator[Metric]:
    gauges = {
        "host_pages": ("baton_host_pages", "Pages that host memory has room for."),
        "used_host_pages": ("baton_host_used_pages", "Pages in host memory, or on their way there."),
        "num_pinned": ("baton_host_pinned_pages", "Pages in host memory that are never evicted."),
        "num_stuck": ("baton_host_stuck_pages", "Host pages of storage calls that hang."),
        "num_waiting": ("baton_tier_waiting_pages", "Pages that wait to be copied to a tier below."),
        "is_attached": ("baton_storage_attached", "Whether storage is used."),
    }
    counters = {
        "num_evicted": ("baton_host_evicted_pages", "Evicted host pages."),
        "num_lost": ("baton_tier_lost_pages", "Pages that were due to be copied to a tier below and were not."),
        "num_late": (
            "baton_storage_late_requests",
            "Requests that started without pages that storage did not deliver in time.",
        ),
        "num_opened": ("baton_storage_breaks", "Times that a storage circuit breaker opened."),
    }
    for field, (name, text) in gauges.items():
        yield _family(GaugeMetricFamily(name, text, labels=["replica"]), field, entries)
    for field, (name, text) in counters.items():
        yield _family(CounterMetricFamily(name, text, labels=["replica"]), field, entries)


def _family(
    family: GaugeMetricFamily | CounterMetricFamily, field: str, entries: list[ReplicaEntry]
) -> GaugeMetricFamily | CounterMetricFamily:
    for entry in entries:
        family.add_metric([entry.replica], float(getattr(entry.load.tiers, field)))
    return family


def _ranks(entries: list[ReplicaEntry]) -> Iterator[Metric]:
    """Yield, for each rank, what its host memory holds and what it knows of storage, which it may share."""
    labels = _RANK_LABELS
    capacity = GaugeMetricFamily("baton_host_bytes", "Host memory for cached pages, in bytes.", labels=labels)
    used = GaugeMetricFamily("baton_host_used_bytes", "Host memory in use, in bytes.", labels=labels)
    evicted = CounterMetricFamily("baton_host_evicted_bytes", "Bytes evicted from host memory.", labels=labels)
    stored = GaugeMetricFamily("baton_storage_used_bytes", "Bytes in storage, as this rank last saw it.", labels=labels)
    objects = CounterMetricFamily(
        "baton_storage_evicted_objects", "Objects that this rank evicted from storage.", labels=labels
    )
    given_up = CounterMetricFamily(
        "baton_storage_evicted_bytes", "Bytes that this rank evicted from storage.", labels=labels
    )
    queue = GaugeMetricFamily("baton_tier_open_jobs", "Tier jobs not done yet.", labels=_JOB_LABELS)
    for entry in entries:
        assert isinstance(entry.load.tiers, TierState)
        for rank in entry.load.tiers.ranks:
            if rank.global_rank < len(entry.rows):
                row = entry.rows[rank.global_rank]
                at, page_bytes = _labels(row), row.layout.page_bytes
                capacity.add_metric(at, rank.host_pages * page_bytes)
                used.add_metric(at, rank.used_host_pages * page_bytes)
                evicted.add_metric(at, rank.num_evicted * page_bytes)
                for kind, num_open in rank.num_open.items():
                    queue.add_metric([*at, kind.value], num_open)
                if rank.storage is not None:
                    stored.add_metric(at, rank.storage.used_bytes)
                    objects.add_metric(at, rank.storage.num_evicted)
                    given_up.add_metric(at, rank.storage.evicted_bytes)
    yield from (capacity, used, evicted, queue, stored, objects, given_up)


def _work(entries: list[ReplicaEntry]) -> Iterator[Metric]:
    """Yield, for each rank, what its tier jobs have done."""
    jobs = CounterMetricFamily("baton_tier_jobs", "Tier jobs done.", labels=_JOB_LABELS)
    num_bytes = CounterMetricFamily("baton_tier_bytes", "Bytes moved between tiers.", labels=_JOB_LABELS)
    tokens = CounterMetricFamily("baton_tier_tokens", "Tokens whose KV was moved between tiers.", labels=_JOB_LABELS)
    times = HistogramMetricFamily("baton_tier_job_seconds", "Time of a tier job, queue and work.", labels=_JOB_LABELS)
    busy = CounterMetricFamily("baton_tier_seconds", "Time spent on tier jobs, without the queue.", labels=_JOB_LABELS)
    failures = CounterMetricFamily("baton_tier_failures", "Failed pages, by reason.", labels=[*_JOB_LABELS, "why"])
    for entry in entries:
        assert isinstance(entry.load.tiers, TierState)
        for work in entry.load.tiers.work:
            if work.global_rank < len(entry.rows):
                row = entry.rows[work.global_rank]
                labels = [*_labels(row), work.kind.value]
                jobs.add_metric(labels, work.num_jobs)
                num_bytes.add_metric(labels, work.num_bytes)
                tokens.add_metric(labels, work.num_bytes // row.layout.page_bytes * row.layout.page_size)
                busy.add_metric(labels, work.busy_s)
                ranges = [*zip(_ENDS, accumulate(work.num_within), strict=True)]
                times.add_metric(labels, ranges, work.waited_s + work.busy_s)
                for why, count in work.failures.items():
                    failures.add_metric([*labels, why], count)
    yield from (jobs, num_bytes, tokens, busy, times, failures)


def _labels(row: RankRow) -> list[str]:
    return [row.replica, *(str(getattr(of, axis)) for axis in _AXES for of in (row.coords, row.sizes))]
