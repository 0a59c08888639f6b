"""The metrics of tiers, from what a leader's heartbeat says of its ranks."""

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from cluster.spec.ids import Incarnation
from cluster.spec.lifecycle import Role
from cluster.spec.registry import RankCoords, RankRow, ReplicaEntry, ReplicaLoad, TableSnapshot
from cluster.spec.tiers import RankTiers, StorageFigures, TierJobKind, TierJobResult, TierState, joined
from router.replica_metrics import replica_metrics
from tests.fakes.paged_ranks import row
from tests.fakes.rows import tier_state
from workers.hicache.policy.jobs import JobCounters


class _Fixed(Collector):
    def __init__(self, snapshot: TableSnapshot | None) -> None:
        self._snapshot = snapshot

    def collect(self) -> list[Metric]:
        return list(replica_metrics(self._snapshot))


def exposition(snapshot: TableSnapshot | None) -> list[str]:
    registry = CollectorRegistry()
    registry.register(_Fixed(snapshot))
    return generate_latest(registry).decode().splitlines()


def snapshot_of(tiers: TierState | None, rows: tuple[RankRow, ...] = ()) -> TableSnapshot:
    rows = rows or tuple(row(Role.PREFILL, rank, 2, num_pages=1) for rank in range(2))
    entry = ReplicaEntry(
        replica=rows[0].replica,
        role=Role.PREFILL,
        incarnation=Incarnation(1),
        ready=True,
        rows=rows,
        load=ReplicaLoad(tiers=tiers),
    )
    return TableSnapshot(version=1, replicas=(entry,), reaped={})


RANK = (
    'cp_rank="1",cp_size="2",dp_rank="0",dp_size="1",{}pp_rank="0",pp_size="1",replica="prefill-0",'
    'tp_rank="0",tp_size="1"'
)
LAYOUT = row(Role.PREFILL, 1, 2, num_pages=1).layout


def two_ranks() -> TierState:
    """Of which the second has done more."""
    tally = JobCounters()
    for rank, num_pages, waited_s, busy_s in ((1, 2, 0.25, 0.25), (1, 1, 0.25, 0.5), (0, 7, 60.0, 0.0)):
        answer = TierJobResult(
            job_id=1,
            global_rank=rank,
            done=[],
            num_bytes=num_pages * LAYOUT.page_bytes,
            waited_s=waited_s,
            busy_s=busy_s,
            failures={"corrupt": 1} if rank else {},
        )
        tally.add(TierJobKind.FETCH, answer)
    figures = StorageFigures(used_bytes=1000, num_evicted=3, evicted_bytes=300)
    return tier_state(
        host_pages=8,
        used_host_pages=3,
        num_pinned=2,
        num_evicted=1,
        num_lost=2,
        num_late=4,
        num_stuck=7,
        num_waiting=5,
        num_opened=6,
        work=tally.work,
        ranks=(
            RankTiers(global_rank=0, host_pages=4, used_host_pages=3, num_evicted=0, num_open={}, storage=None),
            RankTiers(
                global_rank=1,
                host_pages=4,
                used_host_pages=1,
                num_evicted=2,
                num_open={TierJobKind.FETCH: 9},
                storage=figures,
            ),
        ),
    )


def test_the_state_travels_as_it_is() -> None:
    state = two_ranks()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=TierState) == state


def test_jobs_of_every_rank_have_their_own_lines() -> None:
    lines, labels = exposition(snapshot_of(two_ranks())), RANK.format('kind="fetch",')
    for name, value in {
        "baton_tier_bytes_total": 3 * LAYOUT.page_bytes,
        "baton_tier_tokens_total": 3 * LAYOUT.page_size,
        "baton_tier_seconds_total": 0.75,
        "baton_tier_job_seconds_sum": 1.25,
        "baton_tier_open_jobs": 9,
        "baton_tier_jobs_total": 2,
    }.items():
        assert f"{name}{{{labels}}} {float(value)}" in lines
    assert f'baton_tier_failures_total{{{labels},why="corrupt"}} 2.0' in lines
    within = [line for line in lines if line.startswith("baton_tier_job_seconds_bucket") and 'cp_rank="1"' in line]
    assert [line.rpartition(" ")[2] for line in within] == ["0.0"] * 4 + ["1.0"] + ["2.0"] * 3


def test_memory_of_every_rank_has_its_own_lines() -> None:
    snapshot = snapshot_of(two_ranks())
    page_bytes = snapshot.replicas[0].rows[1].layout.page_bytes
    lines = exposition(snapshot)
    for name, value in {
        "baton_host_bytes": 4 * page_bytes,
        "baton_host_used_bytes": page_bytes,
        "baton_host_evicted_bytes_total": 2 * page_bytes,
        "baton_storage_used_bytes": 1000,
        "baton_storage_evicted_objects_total": 3,
        "baton_storage_evicted_bytes_total": 300,
    }.items():
        assert f"{name}{{{RANK.format('')}}} {float(value)}" in lines
    assert sum(line.startswith("baton_storage_used_bytes{") for line in lines) == 1


def test_what_a_leader_alone_knows_is_told_by_replica() -> None:
    lines = exposition(snapshot_of(two_ranks()))
    for name, value in {
        "baton_host_pages": 8,
        "baton_host_pinned_pages": 2,
        "baton_host_stuck_pages": 7,
        "baton_storage_attached": 1,
        "baton_tier_lost_pages_total": 2,
    }.items():
        assert f'{name}{{replica="prefill-0"}} {float(value)}' in lines


def test_replicas_without_tiers_have_no_lines() -> None:
    for snapshot in (None, snapshot_of(None)):
        assert not [
            line for line in exposition(snapshot) if line.startswith(("baton_host", "baton_tier", "baton_storage"))
        ]


def test_dp_ranks_are_told_apart() -> None:
    alone = row(Role.PREFILL, 0, 1, num_pages=1)
    sizes = RankCoords(dp=2, cp=1, tp=1, pp=1)
    rows, states = [], []
    for rank in range(2):
        coords = RankCoords(dp=rank, cp=0, tp=0, pp=0)
        rows.append(msgspec.structs.replace(alone, coords=coords, sizes=sizes, global_rank=rank))
        tally = JobCounters()
        tally.add(TierJobKind.FETCH, TierJobResult(job_id=1, global_rank=rank, done=[True], num_bytes=100 + rank))
        of_rank = RankTiers(
            global_rank=rank, host_pages=4, used_host_pages=rank, num_evicted=0, num_open={}, storage=None
        )
        states.append(tier_state(host_pages=4, work=tally.work, ranks=(of_rank,)))
    lines = exposition(snapshot_of(joined(states), tuple(rows)))
    series = [line.rpartition(" ")[0] for line in lines if not line.startswith("#")]
    assert len(series) == len(set(series))
    assert sum(line.startswith("baton_tier_bytes_total{") for line in lines) == 2
