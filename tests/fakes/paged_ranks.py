"""The rows of ranks with small pages."""

from cluster.spec.ids import Incarnation, Role, replica_id
from cluster.spec.registry import (
    AxisSizes,
    Endpoint,
    KvOwnership,
    RankCoords,
    RankRow,
    TransferMode,
)
from tests.fakes.kv import kv_geometry, kv_layout

PAGE_SIZE = 4
GEOMETRY = kv_geometry(model="m", num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32", page_size=PAGE_SIZE)


def row(
    role: Role,
    cp_rank: int,
    cp: int,
    num_pages: int,
    mode: TransferMode = TransferMode.ALL_RANKS,
    ownership: KvOwnership = KvOwnership.REPLICATED,
) -> RankRow:
    """A rank's row; its address is readable. ``num_pages`` are those of the rank's own pool."""
    return RankRow(
        replica=replica_id(role, 0),
        incarnation=Incarnation(1),
        coords=RankCoords(dp=0, cp=cp_rank, tp=0, pp=0),
        sizes=AxisSizes(dp=1, cp=cp, tp=1, pp=1),
        global_rank=cp_rank,
        address=f"{role}/{cp_rank}",
        endpoint=Endpoint(backend="fake", session="", base_address=0, num_bytes=0),
        geometry=GEOMETRY,
        layout=kv_layout(
            num_pages=num_pages,
            first_head=0,
            num_heads=1,
            first_layer=0,
            num_layers=1,
            page_size=PAGE_SIZE,
            head_dim=1,
            itemsize=4,
        ),
        transfer_mode=mode,
        ownership=ownership,
        build="test",
    )
