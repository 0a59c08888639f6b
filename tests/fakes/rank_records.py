"""Handmade rank records: small, legal, and consistent within a replica."""

from typing import Any

import msgspec

from cluster.spec.ids import Incarnation, parse_replica_id
from cluster.spec.ranks import coords_of, world_size
from cluster.spec.registry import AxisSizes, Endpoint, KvOwnership, RankRecord, TransferMode
from cluster.spec.tiers import TierState
from tests.fakes.kv import kv_geometry, kv_layout

GEOMETRY = kv_geometry(model="fake", num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32", page_size=4)
LAYOUT = kv_layout(
    num_pages=4, first_head=0, num_heads=1, first_layer=0, num_layers=1, page_size=4, head_dim=2, itemsize=4
)


def sizes(dp: int = 1, cp: int = 1, tp: int = 1, pp: int = 1) -> AxisSizes:
    return AxisSizes(dp=dp, cp=cp, tp=tp, pp=pp)


def make_record(replica: str, rank: int, of: AxisSizes, incarnation: int = 1, **changes: Any) -> RankRecord:
    """Return the record of one rank. ``changes`` replace fields."""
    record = RankRecord(
        replica=parse_replica_id(replica),
        incarnation=Incarnation(incarnation),
        coords=coords_of(rank, of),
        sizes=of,
        global_rank=rank,
        address=f"tcp://{replica}.{incarnation}:{rank}",
        endpoint=Endpoint(backend="fake", session="", base_address=0, num_bytes=0),
        geometry=GEOMETRY,
        layout=LAYOUT,
        transfer_mode=TransferMode.ALL_RANKS,
        ownership=KvOwnership.REPLICATED,
        build="test",
    )
    return msgspec.structs.replace(record, **changes)


def make_records(replica: str, of: AxisSizes, incarnation: int = 1) -> list[RankRecord]:
    """Return all rank records of a replica."""
    return [make_record(replica, rank, of, incarnation) for rank in range(world_size(of))]


def tier_state(**changes: Any) -> TierState:
    """Return the idle tiers of a replica. ``changes`` replace fields."""
    state = TierState(
        host_pages=0,
        used_host_pages=0,
        num_pinned=0,
        num_evicted=0,
        num_lost=0,
        num_late=0,
        num_stuck=0,
        num_waiting=0,
        is_attached=True,
        is_storing=False,
        num_opened=0,
        work=(),
        ranks=(),
    )
    return msgspec.structs.replace(state, **changes)
