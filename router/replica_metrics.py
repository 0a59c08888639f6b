"""Metrics of each replica, as reported by its last heartbeat, and of its ranks."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from cluster.spec.lifecycle import Role
from cluster.spec.registry import ReplicaEntry, TableSnapshot

_AXES = ("dp", "cp", "tp", "pp")


def replica_metrics(snapshot: TableSnapshot | None) -> Iterator[Metric]:
    """Yield the metrics of all replicas in the table."""
    entries = snapshot.replicas if snapshot else ()
    yield from _load_metrics(entries)
    yield from _rank_metrics(entries)
    yield from _step_metrics(entries)
    yield _wrong_pages(entries)
    yield _preemptions(entries)
    yield from _graph_metrics(entries)
    yield _expert_metric(entries)
    yield from _page_metrics(entries)


def _load_metrics(entries: tuple[ReplicaEntry, ...]) -> Iterator[Metric]:
    usage = GaugeMetricFamily("baton_kv_cache_usage_perc", "Share of the pages that requests hold.", labels=["replica"])
    cached = GaugeMetricFamily("baton_kv_cached_pages", "Cached pages, held by requests or not.", labels=["replica"])
    evicted = CounterMetricFamily("baton_kv_evicted_pages", "Evicted cached pages.", labels=["replica"])
    running = GaugeMetricFamily("baton_replica_requests_running", "Requests that hold pages.", labels=["replica"])
    waiting = GaugeMetricFamily("baton_replica_requests_waiting", "Requests that wait for pages.", labels=["replica"])
    for entry in entries:
        load = entry.load
        usage.add_metric([entry.replica], 1 - load.free_pages / load.total_pages if load.total_pages else 0)
        cached.add_metric([entry.replica], load.cached_pages)
        evicted.add_metric([entry.replica], load.evicted_pages)
        running.add_metric([entry.replica], load.num_running)
        waiting.add_metric([entry.replica], load.num_waiting)
    yield from (usage, cached, evicted, running, waiting, _cache_config(entries))


def _cache_config(entries: tuple[ReplicaEntry, ...]) -> Metric:
    labels = ["replica", "block_size", "num_gpu_blocks", "cache_dtype"]
    info = GaugeMetricFamily("baton_cache_config_info", "Page size in tokens, pages, and KV dtype.", labels=labels)
    for entry in entries:
        geometry = entry.rows[0].geometry
        info.add_metric([entry.replica, str(geometry.page_size), str(entry.load.total_pages), geometry.dtypes], 1)
    return info


def _rank_metrics(entries: tuple[ReplicaEntry, ...]) -> Iterator[Metric]:
    info = GaugeMetricFamily("baton_rank_info", "Ranks and their coordinates.", labels=["replica", "rank", *_AXES])
    labels = ["replica", "rank"]
    num_bytes = CounterMetricFamily("baton_kv_transfer_bytes", "Bytes of KV sent to decode.", labels=labels)
    seconds = CounterMetricFamily("baton_kv_transfer_seconds", "Time of writing KV.", labels=labels)
    transfers = CounterMetricFamily("baton_kv_transfers", "Requests whose KV was sent.", labels=labels)
    steps = CounterMetricFamily("baton_rank_steps", "Steps computed by a rank.", labels=labels)
    step_s = CounterMetricFamily(
        "baton_rank_step_seconds", "Time of these steps, including waits for other ranks.", labels=labels
    )
    for entry in entries:
        for row in entry.rows:
            at = [str(getattr(row.coords, axis)) for axis in _AXES]
            info.add_metric([entry.replica, str(row.global_rank), *at], 1)
        for computed in entry.load.computed:
            rank = [entry.replica, str(computed.global_rank)]
            steps.add_metric(rank, computed.num_steps)
            step_s.add_metric(rank, computed.total_s)
        for sent in entry.load.sends:
            rank = [entry.replica, str(sent.global_rank)]
            num_bytes.add_metric(rank, sent.num_bytes)
            seconds.add_metric(rank, sent.write_s)
            transfers.add_metric(rank, sent.num_transfers)
    yield from (info, num_bytes, seconds, transfers, steps, step_s)


def _step_metrics(entries: tuple[ReplicaEntry, ...]) -> list[Metric]:
    labels = ["replica", "strategy", "passing"]
    metrics: dict[str, CounterMetricFamily | GaugeMetricFamily] = {
        "num_steps": CounterMetricFamily("baton_prefill_steps", "Prefill steps.", labels=labels),
        "num_tokens": CounterMetricFamily(
            "baton_prefill_step_tokens", "Tokens computed in prefill steps.", labels=labels
        ),
        "total_s": CounterMetricFamily("baton_prefill_step_seconds", "Time of all prefill steps.", labels=labels),
        "total_estimate_s": CounterMetricFamily(
            "baton_prefill_step_estimate_seconds",
            "Estimated time of all prefill steps when their strategy was chosen.",
            labels=labels,
        ),
        "last_s": GaugeMetricFamily("baton_prefill_last_step_seconds", "Time of the newest step.", labels=labels),
        "last_estimate_s": GaugeMetricFamily(
            "baton_prefill_last_step_estimate_seconds", "Estimated time of the newest step.", labels=labels
        ),
    }
    for entry in entries:
        for times in entry.load.steps:
            for name, metric in metrics.items():
                metric.add_metric([entry.replica, times.strategy, times.passing or ""], getattr(times, name))
    return list(metrics.values())


def _wrong_pages(entries: tuple[ReplicaEntry, ...]) -> Metric:
    wrong = CounterMetricFamily(
        "baton_wrong_pages", "Pages of KV that differed from those sent, by receiver.", labels=["replica"]
    )
    for entry in entries:
        if entry.role is Role.DECODE:
            wrong.add_metric([entry.replica], entry.load.wrong_pages)
    return wrong


def _preemptions(entries: tuple[ReplicaEntry, ...]) -> Metric:
    metric = CounterMetricFamily(
        "baton_num_preemptions", "Times that requests gave their pages back.", labels=["replica"]
    )
    for entry in entries:
        metric.add_metric([entry.replica], entry.load.num_preempted)
    return metric


def _expert_metric(entries: tuple[ReplicaEntry, ...]) -> Metric:
    metric = CounterMetricFamily(
        "baton_expert_tokens", "Tokens computed by each expert, over all layers.", labels=["replica", "expert"]
    )
    for entry in entries:
        for expert, num_tokens in sorted(entry.load.expert_tokens.items()):
            metric.add_metric([entry.replica, str(expert)], num_tokens)
    return metric


def _graph_metrics(entries: tuple[ReplicaEntry, ...]) -> Iterator[Metric]:
    steps = CounterMetricFamily(
        "baton_decode_graph_steps",
        "Decode steps on GPUs, replayed from CUDA graphs or not, and why not.",
        labels=["replica", "way"],
    )
    held = GaugeMetricFamily(
        "baton_decode_graph_bytes",
        "GPU memory of the CUDA graphs of decode steps, as measured on the leader.",
        labels=["replica"],
    )
    for entry in entries:
        for way, num_steps in entry.load.graph_steps.items():
            steps.add_metric([entry.replica, way], num_steps)
        if entry.load.graph_bytes:
            held.add_metric([entry.replica], entry.load.graph_bytes)
    yield from (steps, held)


def _page_metrics(entries: tuple[ReplicaEntry, ...]) -> Iterator[Metric]:
    pages = GaugeMetricFamily(
        "baton_replica_pages",
        "Pages of a replica, by state; stopping: released, but may still be written to; quarantined: so for long.",
        labels=["replica", "state"],
    )
    dropped = CounterMetricFamily(
        "baton_replica_message_dropped",
        "Messages that a leader dropped, by type or reason.",
        labels=["replica", "kind"],
    )
    for entry in entries:
        load = entry.load
        for state in ("total", "free", "stopping", "quarantined"):
            pages.add_metric([entry.replica, state], getattr(load, f"{state}_pages"))
        for kind, count in sorted(load.dropped.items()):
            dropped.add_metric([entry.replica, kind], count)
    yield pages
    yield dropped
