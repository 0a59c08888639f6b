"""The rank table: readiness, leases, incarnations and refusals, independent of message order and repetition."""

from typing import Any

import msgspec
import pytest

from cluster.bootstrap.table import BootstrapTable, RefusalCode, TableRefusedError, WatchedTable, records_digest
from cluster.spec.ids import Incarnation, ReplicaId
from cluster.spec.registry import (
    Heartbeat,
    KvOwnership,
    RankCoords,
    RankRecord,
    ReplicaEntry,
    ReplicaLoad,
    TransferMode,
)
from tests.fakes.clock import ManualClock
from tests.fakes.rank_records import GEOMETRY, make_record, make_records, sizes

LEASE_S = 3.0
P0 = ReplicaId("prefill-0")
CP2 = sizes(cp=2)


def beat_of(records: list[RankRecord], num_tokens: int = 0, *, draining: bool = False) -> Heartbeat:
    return Heartbeat(
        replica=records[0].replica,
        incarnation=records[0].incarnation,
        records_digest=records_digest(records),
        load=ReplicaLoad(num_tokens=num_tokens, draining=draining),
    )


def table_with(records: list[RankRecord], now_s: float = 0.0) -> BootstrapTable:
    """Return a table in which one replica is ready."""
    table = BootstrapTable(LEASE_S)
    for record in records:
        table.register(record)
    table.heartbeat(beat_of(records), now_s)
    return table


def entry(table: BootstrapTable, now_s: float = 0.0, replica: ReplicaId = P0) -> ReplicaEntry:
    found = table.snapshot(now_s).find(replica)
    assert found is not None
    return found


def refusal(table: BootstrapTable, record: RankRecord) -> TableRefusedError:
    with pytest.raises(TableRefusedError) as caught:
        table.register(record)
    return caught.value


def test_ready_needs_every_record_and_a_heartbeat() -> None:
    table = BootstrapTable(LEASE_S)
    first, second = make_records(P0, CP2)
    table.register(first)
    with pytest.raises(TableRefusedError, match="do not match") as caught:
        table.heartbeat(beat_of([first]), 0.0)
    assert caught.value.code is RefusalCode.UNKNOWN_RANKS
    table.register(second)
    assert not entry(table).ready
    table.heartbeat(beat_of([first, second]), 0.0)
    assert entry(table).ready
    assert entry(table).ranks == (first, second)
    assert entry(table).leader is first


def test_lease_runs_out_and_a_heartbeat_renews_it() -> None:
    records = make_records(P0, sizes())
    table = table_with(records, now_s=10.0)
    assert entry(table, now_s=12.9).ready
    table.heartbeat(beat_of(records), 12.9)
    assert entry(table, now_s=15.8).ready
    version = table.version
    assert not entry(table, now_s=15.9).ready
    assert table.version == version + 1
    table.heartbeat(beat_of(records), 20.0)
    assert entry(table, now_s=20.0).ready


def test_leases_do_not_expire_while_the_service_is_stalled() -> None:
    records, clock = make_records(P0, sizes()), ManualClock()
    table = table_with(records)
    watched = WatchedTable(table, clock)
    watched.look()
    for now_s in (0.25, 30.0, 30.25, 60.0):  # the service is stopped twice
        clock.time_s = now_s
        watched.look()
        assert entry(table, watched.now_s()).ready
    table.heartbeat(beat_of(records), watched.now_s())
    while clock.time_s < 60.0 + LEASE_S:
        assert entry(table, watched.now_s()).ready
        clock.time_s += 0.25
        watched.look()
    assert entry(table, watched.now_s()).silent == (0,)


def test_a_silent_rank_makes_its_replica_not_ready_until_it_shows_life() -> None:
    records = make_records(P0, sizes(cp=3))
    one = records[0].incarnation
    table = table_with(records, now_s=0.0)
    assert entry(table, now_s=2.9).ready, "the others have the time of a lease to begin"
    for rank in (1, 2):
        table.alive(P0, one, rank, 2.9)
    table.heartbeat(beat_of(records), 2.9)
    table.alive(P0, one, 2, 5.0)
    table.heartbeat(beat_of(records), 5.0)
    version = table.version
    assert (entry(table, now_s=5.9).ready, entry(table, now_s=5.9).silent) == (False, (1,))
    assert table.version == version + 1
    table.heartbeat(beat_of(records), 6.0)
    assert entry(table, now_s=6.0).silent == (1,), "its leader does not speak for it"
    table.alive(P0, one, 1, 6.0)
    assert (entry(table, now_s=6.0).ready, table.version) == (True, version + 2)
    assert entry(table, now_s=20.0).silent == (0, 1, 2)


def test_ranks_of_an_earlier_start_and_unknown_ones_are_refused() -> None:
    table = BootstrapTable(LEASE_S)
    codes: list[RefusalCode | None] = []
    for records in (None, make_records(P0, CP2, incarnation=3)):
        for record in records or ():
            table.register(record)
        for incarnation, rank in ((2, 1), (3, 1), (3, 2), (3, 0)):
            try:
                table.alive(P0, Incarnation(incarnation), rank, 0.0)
                codes.append(None)
            except TableRefusedError as error:
                codes.append(error.code)
    unknown, superseded = RefusalCode.UNKNOWN_RANKS, RefusalCode.SUPERSEDED
    assert codes == [unknown] * 4 + [superseded, None, unknown, unknown]


def test_registering_again_changes_nothing() -> None:
    records = make_records(P0, CP2)
    table = table_with(records)
    before = table.snapshot(0.0)
    for record in records:
        table.register(record)
    assert table.snapshot(0.0) == before


def test_unchanged_load_changes_no_version_and_changed_load_does() -> None:
    records = make_records(P0, CP2)
    table = table_with(records)
    version = table.version
    table.heartbeat(beat_of(records), 1.0)
    assert table.version == version
    table.heartbeat(beat_of(records, num_tokens=7), 1.0)
    assert table.version == version + 1
    assert entry(table, 1.0).load.num_tokens == 7
    assert not table.is_outdated(version), "counts alone wake no watcher"
    table.heartbeat(beat_of(records, num_tokens=7, draining=True), 1.0)
    assert table.is_outdated(version + 1)
    assert not table.is_outdated(table.version)
    assert table.is_outdated(table.version + 1), "the version of a table before the service restarted"


def test_higher_incarnation_replaces_all_records() -> None:
    table = table_with(make_records(P0, CP2))
    table.register(make_record(P0, 1, CP2, incarnation=2))
    now = entry(table)
    assert (now.incarnation, now.ready, len(now.ranks)) == (2, False, 1)


def test_lower_incarnation_is_refused_by_name() -> None:
    table = table_with(make_records(P0, CP2, incarnation=5))
    error = refusal(table, make_record(P0, 0, CP2, incarnation=4))
    assert error.code is RefusalCode.SUPERSEDED
    assert str(error) == "prefill-0: incarnation 4 was replaced by 5; only a higher one may register"
    with pytest.raises(TableRefusedError, match="was replaced by 5"):
        table.heartbeat(beat_of(make_records(P0, CP2, incarnation=4)), 0.0)
    assert entry(table).ready


def test_restarted_table_asks_for_all_records_again() -> None:
    records = make_records(P0, CP2)
    table = BootstrapTable(LEASE_S)
    with pytest.raises(TableRefusedError, match="send every record again"):
        table.heartbeat(beat_of(records), 0.0)
    assert table_with(records).snapshot(0.0).replicas[0].ready


def test_heartbeat_with_another_record_set_is_unknown() -> None:
    records = make_records(P0, CP2)
    table = table_with(records)
    other = [records[0], msgspec.structs.replace(records[1], address="tcp://elsewhere:1")]
    with pytest.raises(TableRefusedError) as caught:
        table.heartbeat(beat_of(other), 0.0)
    assert caught.value.code is RefusalCode.UNKNOWN_RANKS


def test_unregistered_incarnation_cannot_come_back() -> None:
    table = table_with(make_records(P0, CP2, incarnation=3))
    table.unregister(P0, Incarnation(3), reaped=False)
    assert table.snapshot(0.0).find(P0) is None
    assert table.snapshot(0.0).reaped == {}
    assert "incarnation 3 has ended" in str(refusal(table, make_record(P0, 0, CP2, incarnation=3)))
    table.register(make_record(P0, 0, CP2, incarnation=4))
    assert entry(table).incarnation == 4


def test_reaping_an_old_incarnation_does_not_affect_the_new_one() -> None:
    table = table_with(make_records(P0, CP2, incarnation=9))
    table.unregister(P0, Incarnation(8), reaped=True)
    assert entry(table).ready
    assert table.snapshot(0.0).reaped == {P0: 8}
    table.unregister(P0, Incarnation(7), reaped=True)
    assert table.snapshot(0.0).reaped == {P0: 8}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"build": "other"}, "got build other, but rank 0 registered test"),
        ({"transfer_mode": TransferMode.RANK0}, "got transfer mode rank0, but rank 0 registered all_ranks"),
        ({"ownership": KvOwnership.SHARDED}, "got KV ownership sharded, but rank 0 registered replicated"),
        ({"sizes": sizes(cp=3)}, "got sizes dp1/cp3/tp1/pp1, but rank 0 registered dp1/cp2/tp1/pp1"),
        ({"geometry": msgspec.structs.replace(GEOMETRY, page_size=8)}, "got page size 8, but rank 0 registered 4"),
        ({"geometry": msgspec.structs.replace(GEOMETRY, num_layers=2)}, "KV geometry"),
        ({"geometry": msgspec.structs.replace(GEOMETRY, model="m")}, "got model m, but rank 0 registered fake"),
        ({"global_rank": 0}, "got global rank 0, but the coordinates of rank 1"),
        ({"coords": RankCoords(dp=0, cp=5, tp=0, pp=0)}, "cp_rank 5 is out of range; allowed: 0 to 1"),
        ({"incarnation": Incarnation(0)}, "got incarnation 0; allowed: 1 or more"),
    ],
)
def test_record_that_does_not_fit_is_refused_in_words(changes: dict[str, Any], words: str) -> None:
    table = BootstrapTable(LEASE_S)
    table.register(make_record(P0, 0, CP2))
    error = refusal(table, make_record(P0, 1, CP2, **changes))
    assert error.code is RefusalCode.MISMATCH
    assert words in str(error)
    assert len(entry(table).ranks) == 1


def test_other_content_at_the_same_rank_is_refused() -> None:
    table = table_with(make_records(P0, CP2))
    error = refusal(table, make_record(P0, 1, CP2, address="tcp://elsewhere:1"))
    assert str(error).startswith("prefill-0 dp0/cp1/tp0/pp0: already registered with different content")
