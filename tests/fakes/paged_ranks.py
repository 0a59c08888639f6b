"""Rank records with small pages."""

from cluster.spec.ids import Role, replica_id
from cluster.spec.registry import KvOwnership, RankRecord, TransferMode
from tests.fakes.kv import kv_geometry, kv_layout
from tests.fakes.rank_records import make_record, sizes

PAGE_SIZE = 4
GEOMETRY = kv_geometry(model="m", num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32", page_size=PAGE_SIZE)


def record(
    role: Role,
    cp_rank: int,
    cp: int,
    num_pages: int,
    mode: TransferMode = TransferMode.ALL_RANKS,
    ownership: KvOwnership = KvOwnership.REPLICATED,
) -> RankRecord:
    """Return a rank record with a readable address. ``num_pages`` is the size of the rank's own pool."""
    layout = kv_layout(
        num_pages=num_pages,
        first_head=0,
        num_heads=1,
        first_layer=0,
        num_layers=1,
        page_size=PAGE_SIZE,
        head_dim=1,
        itemsize=4,
    )
    return make_record(
        replica_id(role, 0),
        cp_rank,
        sizes(cp=cp),
        address=f"{role}/{cp_rank}",
        geometry=GEOMETRY,
        layout=layout,
        transfer_mode=mode,
        ownership=ownership,
    )
