"""What the tiers below the device caches hold and do, as heartbeats tell it."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from cluster.spec.registry import RankRow, ReplicaEntry, TableSnapshot
from cluster.spec.tiers import TierState

_RANK_LABELS = ["replica", "tp_rank", "tp_size", "pp_rank", "pp_size", "cp_rank", "cp_size", "order"]


def tier_metrics(snapshot: TableSnapshot | None) -> Iterator[Metric]:
    """Of every replica in the table that has such tiers."""
    entries = [entry for entry in snapshot.replicas if entry.load.tiers is not None] if snapshot else []
    yield from _states(entries)
    yield from _work(entries)


def _states(entries: list[ReplicaEntry]) -> Iterator[Metric]:
    gauges = {
        "host_pages": ("baton_host_pages", "Pages that host memory has room for."),
        "used_host_pages": ("baton_host_used_pages", "Pages in host memory, or on their way there."),
        "num_waiting": ("baton_tier_waiting_pages", "Pages that wait to be copied to a tier below."),
        "is_attached": ("baton_storage_attached", "Whether storage is used."),
    }
    counters = {
        "num_evicted": ("baton_host_evicted_pages", "Host pages that made room for others."),
        "num_lost": ("baton_tier_lost_pages", "Pages that were to be copied to a tier below, and were not."),
        "num_late": ("baton_storage_late_requests", "Requests that went on without pages that storage had not given."),
        "num_opened": ("baton_storage_breaks", "Times that storage was left alone after failures."),
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


def _work(entries: list[ReplicaEntry]) -> Iterator[Metric]:
    """By rank: what its orders came to."""
    orders = CounterMetricFamily("baton_tier_orders", "Orders carried out.", labels=_RANK_LABELS)
    num_bytes = CounterMetricFamily("baton_tier_bytes", "Bytes moved between tiers.", labels=_RANK_LABELS)
    busy = CounterMetricFamily("baton_tier_seconds", "Time taken, without waiting for a turn.", labels=_RANK_LABELS)
    failures = CounterMetricFamily("baton_tier_failures", "Pages that failed, by why.", labels=[*_RANK_LABELS, "why"])
    for entry in entries:
        assert isinstance(entry.load.tiers, TierState)
        for work in entry.load.tiers.work:
            if work.global_rank < len(entry.rows):
                labels = [*_labels(entry.rows[work.global_rank]), work.kind.value]
                orders.add_metric(labels, work.num_orders)
                num_bytes.add_metric(labels, work.num_bytes)
                busy.add_metric(labels, work.busy_s)
                for why, count in work.failures.items():
                    failures.add_metric([*labels, why], count)
    yield from (orders, num_bytes, busy, failures)


def _labels(row: RankRow) -> list[str]:
    at, of = row.coords, row.sizes
    return [row.replica, *map(str, (at.tp, of.tp, at.pp, of.pp, at.cp, of.cp))]
