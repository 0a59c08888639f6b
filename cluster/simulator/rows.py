"""The rows of a simulated replica: one layer, one head, so that a page is a page of tokens."""

from cluster.simulator.scenario import PAGE_SIZE, Shape
from cluster.spec.ids import Incarnation, ReplicaId
from cluster.spec.kv import KvGeometry, key_value_group
from cluster.spec.lifecycle import Role
from cluster.spec.pool import page_layout
from cluster.spec.ranks import coords_of
from cluster.spec.registry import Endpoint, KvOwnership, RankCoords, RankRow

GEOMETRY = KvGeometry(
    model="simulated", num_layers=1, groups=(key_value_group(range(1), 1, 1, "float32"),), page_size=PAGE_SIZE
)


def make_rows(shape: Shape, replica: ReplicaId, incarnation: Incarnation, machine: str) -> list[RankRow]:
    """The rows of one start of a replica, by global rank."""
    role = Role(replica.partition("-")[0])
    if role is Role.PREFILL:
        sizes = RankCoords(dp=shape.dp, cp=shape.cp, tp=1, pp=1)
    else:
        sizes = RankCoords(dp=shape.decode_dp, cp=1, tp=1, pp=1)
    return [_row(shape, replica, role, incarnation, machine, sizes, rank) for rank in range(sizes.dp * sizes.cp)]


def _row(
    shape: Shape,
    replica: ReplicaId,
    role: Role,
    incarnation: Incarnation,
    machine: str,
    sizes: RankCoords,
    global_rank: int,
) -> RankRow:
    start = f"{machine}/{replica}.{incarnation}.{global_rank}"
    ownership = shape.ownership if role is Role.PREFILL else KvOwnership.REPLICATED
    num_pages = shape.prefill_pages if role is Role.PREFILL else shape.decode_pages
    layout = page_layout(GEOMETRY, sizes, coords_of(global_rank, sizes), num_pages // ownership.num_owners(sizes.cp))
    return RankRow(
        replica=replica,
        role=role,
        incarnation=incarnation,
        coords=coords_of(global_rank, sizes),
        sizes=sizes,
        global_rank=global_rank,
        address=f"{machine}/{replica}.{global_rank}" if shape.reuses_addresses else start,
        endpoint=Endpoint(backend="simulated", session=start, base_address=0, num_bytes=layout.pool_bytes),
        geometry=GEOMETRY,
        layout=layout,
        transfer_mode=shape.mode,
        page_filter=shape.page_filter,
        ownership=ownership,
        build="simulated",
    )
