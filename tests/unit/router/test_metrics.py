"""Metrics: what leaders' heartbeats report, and counters and histograms in Prometheus's own format."""

from collections.abc import Sequence

import msgspec
import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from cluster.spec.ids import Incarnation, Role
from cluster.spec.registry import (
    AxisSizes,
    ComputeTimes,
    RankCoords,
    RankRecord,
    ReplicaEntry,
    ReplicaLoad,
    SendTimes,
    StepTimes,
    TableSnapshot,
)
from cluster.spec.sampling import Sampling, Stopping
from cluster.spec.strategy import Passing, Strategy
from cluster.spec.tiers import JOB_BOUNDS_S, RankTiers, RankWork, StorageFigures, TierJobKind, TierState
from cluster.spec.wire import TokenIds
from router.metrics import Counter, Histogram, Metrics
from router.page_index import PromptKeys
from router.request import GenerateRequest, KnownTokens
from router.state_metrics import ReplicaMetrics
from tests.fakes.paged_ranks import record
from tests.fakes.rank_records import tier_state

Samples = list[tuple[dict[str, str], float]]
RECORDS = tuple(record(Role.PREFILL, rank, 2, num_pages=1) for rank in range(2))
LAYOUT = RECORDS[1].layout
SENT = SendTimes(global_rank=0, num_transfers=2, num_bytes=4096, write_s=0.5)
STEPS = StepTimes(strategy=Strategy.ZIGZAG, passing=Passing.PASS_KV, num_steps=3, num_tokens=900)


def samples(load: ReplicaLoad, family: str, records: tuple[RankRecord, ...] = RECORDS) -> Samples:
    """Return labels (except the replica) and values of one metric family when a prefill replica reports this load."""
    load = msgspec.json.decode(msgspec.json.encode(load), type=ReplicaLoad)
    entry = ReplicaEntry(replica=records[0].replica, incarnation=Incarnation(1), ready=True, ranks=records, load=load)
    families = {
        made.name: made for made in ReplicaMetrics(TableSnapshot(version=1, replicas=(entry,), reaped={})).collect()
    }
    found = [(dict(sample.labels), sample.value) for sample in families[f"baton_{family}"].samples]
    assert all(labels.pop("replica") == entry.replica for labels, _ in found)
    return found


@pytest.mark.parametrize(
    ("known", "num_cached", "missed"),
    [
        (KnownTokens(), 0, {"unknown": 100, "evicted": 0, "storage": 0}),
        (KnownTokens(), 60, {"unknown": 40, "evicted": 0, "storage": 0}),
        (KnownTokens(80, 80), 80, {"unknown": 20, "evicted": 0, "storage": 0}),
        (KnownTokens(80, 80), 30, {"unknown": 20, "evicted": 50, "storage": 0}),
        (KnownTokens(80, 30), 30, {"unknown": 20, "evicted": 0, "storage": 50}),
        (KnownTokens(80, 30), 10, {"unknown": 20, "evicted": 20, "storage": 50}),
    ],
)
def test_computed_tokens_are_counted_by_why_no_cache_gave_them(
    known: KnownTokens, num_cached: int, missed: dict[str, float]
) -> None:
    prompt, metrics = TokenIds.of(range(100)), Metrics()
    request = GenerateRequest(
        prompt_ids=prompt, sampling=Sampling(), stopping=Stopping(max_tokens=1), page_keys=PromptKeys(prompt, 10, "")
    )
    request.known = known
    metrics.on_prompt(request, num_cached)
    found = {metric.name: metric for metric in metrics.collect()}["baton_prefix_cache_missed"]
    assert {sample.labels["reason"]: sample.value for sample in found.samples} == missed


@pytest.mark.parametrize(
    ("load", "family", "expected"),
    [
        (ReplicaLoad(num_preempted=5), "num_preemptions", [({}, 5)]),
        (ReplicaLoad(num_corrupted=2), "corrupted_requests", [({}, 2)]),
        (ReplicaLoad(expert_tokens={1: 7, 0: 5}), "expert_tokens", [({"expert": "0"}, 5), ({"expert": "1"}, 7)]),
        (ReplicaLoad(graph_steps={"replayed": 3}), "decode_graph_steps", [({"outcome": "replayed"}, 3)]),
        (ReplicaLoad(graph_bytes=5), "decode_graph_bytes", [({}, 5)]),
        (ReplicaLoad(), "decode_graph_bytes", []),
        (ReplicaLoad(), "wrong_pages", []),
        (ReplicaLoad(total_pages=8, free_pages=6), "kv_cache_usage_perc", [({}, 0.25)]),
        (ReplicaLoad(cached_pages=2), "kv_cached_pages", [({}, 2)]),
        (ReplicaLoad(evicted_pages=7), "kv_evicted_pages", [({}, 7)]),
        (ReplicaLoad(num_running=3), "replica_requests_running", [({}, 3)]),
        (ReplicaLoad(num_waiting=5), "replica_requests_waiting", [({}, 5)]),
        (ReplicaLoad(sends=(SENT,)), "kv_transfers", [({"rank": "0"}, 2)]),
        (ReplicaLoad(sends=(SENT,)), "kv_transfer_bytes", [({"rank": "0"}, 4096)]),
        (ReplicaLoad(sends=(SENT,)), "kv_transfer_seconds", [({"rank": "0"}, 0.5)]),
        (ReplicaLoad(steps=(STEPS,)), "prefill_step_tokens", [({"strategy": "zigzag", "passing": "pass_kv"}, 900)]),
        (
            ReplicaLoad(computed=(ComputeTimes(global_rank=1, num_steps=3, total_s=0.5),)),
            "rank_step_seconds",
            [({"rank": "1"}, 0.5)],
        ),
    ],
)
def test_metrics_from_a_leaders_load(load: ReplicaLoad, family: str, expected: Samples) -> None:
    assert samples(load, family) == expected


def test_pages_and_their_type_are_labels() -> None:
    ((labels, value),) = samples(ReplicaLoad(total_pages=9), "cache_config_info")
    assert (labels["num_gpu_blocks"], value) == ("9", 1)
    assert labels.keys() == {"block_size", "num_gpu_blocks", "cache_dtype"}


def rank_tiers(global_rank: int, storage: StorageFigures | None = None) -> RankTiers:
    return RankTiers(
        global_rank=global_rank,
        host_pages=4,
        used_host_pages=1,
        num_evicted=2,
        num_open={TierJobKind.FETCH: 9},
        storage=storage,
    )


def fetches(global_rank: int) -> RankWork:
    """Return the work of fetching three pages in two jobs: one within the first bucket, one above the last."""
    return RankWork(
        kind=TierJobKind.FETCH,
        global_rank=global_rank,
        num_jobs=2,
        num_bytes=3 * LAYOUT.page_bytes,
        busy_s=0.75,
        waited_s=0.5,
        num_within=(1, *(0 for _ in JOB_BOUNDS_S[1:]), 1),
        failures={"corrupt": 1},
    )


def tiers_of_the_second_rank() -> TierState:
    figures = StorageFigures(used_bytes=1000, num_evicted=3, evicted_bytes=300)
    return tier_state(host_pages=8, num_lost=2, work=(fetches(1),), ranks=(rank_tiers(1, figures),))


@pytest.mark.parametrize(
    ("family", "labels", "value"),
    [
        ("host_bytes", {}, 4 * LAYOUT.page_bytes),
        ("host_used_bytes", {}, LAYOUT.page_bytes),
        ("host_evicted_bytes", {}, 2 * LAYOUT.page_bytes),
        ("storage_used_bytes", {}, 1000),
        ("storage_evicted_objects", {}, 3),
        ("storage_evicted_bytes", {}, 300),
        ("tier_open_jobs", {"kind": "fetch"}, 9),
        ("tier_jobs", {"kind": "fetch"}, 2),
        ("tier_bytes", {"kind": "fetch"}, 3 * LAYOUT.page_bytes),
        ("tier_tokens", {"kind": "fetch"}, 3 * LAYOUT.page_size),
        ("tier_seconds", {"kind": "fetch"}, 0.75),
        ("tier_failures", {"kind": "fetch", "reason": "corrupt"}, 1),
    ],
)
def test_tiers_of_each_rank(family: str, labels: dict[str, str], value: float) -> None:
    ranks = {"cp_rank": "1", "cp_size": "2", "dp_rank": "0", "dp_size": "1"}
    ranks |= {"tp_rank": "0", "tp_size": "1", "pp_rank": "0", "pp_size": "1"}
    assert samples(ReplicaLoad(tiers=tiers_of_the_second_rank()), family) == [(ranks | labels, value)]


def test_times_of_jobs_are_a_histogram() -> None:
    *buckets, count, total = samples(ReplicaLoad(tiers=tiers_of_the_second_rank()), "tier_job_seconds")
    assert [value for _, value in buckets] == [1.0] * len(JOB_BOUNDS_S) + [2.0]
    assert (count[1], total[1]) == (2, 1.25)


def test_tiers_of_a_replica() -> None:
    load = ReplicaLoad(tiers=tiers_of_the_second_rank())
    assert samples(load, "host_pages") == [({}, 8)]
    assert samples(load, "tier_lost_pages") == [({}, 2)]
    assert samples(ReplicaLoad(), "host_pages") == samples(ReplicaLoad(), "tier_bytes") == []


def test_dp_ranks_have_separate_series() -> None:
    alone, sizes = record(Role.PREFILL, 0, 1, num_pages=1), AxisSizes(dp=2, cp=1, tp=1, pp=1)
    records = tuple(
        msgspec.structs.replace(alone, coords=RankCoords(dp=rank, cp=0, tp=0, pp=0), sizes=sizes, global_rank=rank)
        for rank in range(2)
    )
    tiers = tier_state(host_pages=4, work=(fetches(0), fetches(1)), ranks=(rank_tiers(0), rank_tiers(1)))
    found = samples(ReplicaLoad(tiers=tiers), "tier_bytes", records)
    assert [labels["dp_rank"] for labels, _ in found] == ["0", "1"]


_BOUNDS = (0.5, 1, 10)
_VALUES = st.lists(st.tuples(st.sampled_from(["a", "b"]), st.sampled_from([0, 0.5, 0.75, 1, 2.25, 10, 11, 1e9])))


def _lines(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


class _Own(Collector):
    def __init__(self, *measures: Counter | Histogram) -> None:
        self._measures = measures

    def collect(self) -> list[Metric]:
        return [measure.family() for measure in self._measures]


@given(_VALUES)
def test_as_prometheus_has_it(values: Sequence[tuple[str, float]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    count, spread = Counter("sums", "Help.", "name"), Histogram("spans", "More help.", _BOUNDS, "name")
    ours.register(_Own(count, spread))
    their_count = prometheus_client.Counter("sums", "Help.", ["name"], registry=theirs)
    their_spread = prometheus_client.Histogram("spans", "More help.", ["name"], buckets=_BOUNDS, registry=theirs)
    for name, value in values:
        count.add(value, name)
        spread.observe(value, name)
        their_count.labels(name).inc(value)
        their_spread.labels(name).observe(value)
    assert _lines(ours) == _lines(theirs)


def test_without_labels_there_is_a_line_before_anything_happens() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    ours.register(_Own(Counter("sums", "Help."), Histogram("spans", "More help.", _BOUNDS)))
    prometheus_client.Counter("sums", "Help.", registry=theirs)
    prometheus_client.Histogram("spans", "More help.", buckets=_BOUNDS, registry=theirs)
    assert _lines(ours) == _lines(theirs)
