"""The rows of a simulated replica: a few layers and heads, with one byte for K and for V of each token."""

from cluster.simulator.scenario import PAGE_SIZE, Shape
from cluster.spec.config import TransferBackendName
from cluster.spec.ids import Incarnation, ReplicaId
from cluster.spec.kv import KvGeometry, PoolLayout
from cluster.spec.lifecycle import Role
from cluster.spec.ranks import coords_of, kv_heads_of, stage_layers, world_size
from cluster.spec.registry import Endpoint, KvOwnership, RankCoords, RankRow


def make_rows(shape: Shape, replica: ReplicaId, incarnation: Incarnation, machine: str) -> list[RankRow]:
    """The rows of one start of a replica, by global rank."""
    role = Role(replica.partition("-")[0])
    if role is Role.PREFILL:
        sizes = RankCoords(dp=shape.dp, cp=shape.cp, tp=shape.tp, pp=shape.pp)
    else:
        sizes = RankCoords(dp=shape.decode_dp, cp=1, tp=shape.decode_tp, pp=shape.decode_pp)
    return [_row(shape, replica, role, incarnation, machine, sizes, rank) for rank in range(world_size(sizes))]


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
    coords = coords_of(global_rank, sizes)
    ownership = shape.ownership if role is Role.PREFILL else KvOwnership.REPLICATED
    layout = _layout(shape, role, ownership.num_owners(sizes.cp), coords, sizes)
    host = None
    if shape.tiers is not None and shape.prefix_cache:
        backend = TransferBackendName.SHARED_MEMORY if shape.tiers.shares_host else "simulated"
        num_bytes = shape.tiers.host_pages * layout.page_bytes
        host = Endpoint(backend=backend, session=start, base_address=0, num_bytes=num_bytes)
    return RankRow(
        replica=replica,
        role=role,
        incarnation=incarnation,
        coords=coords,
        sizes=sizes,
        global_rank=global_rank,
        address=f"{machine}/{replica}.{global_rank}" if shape.reuses_addresses else start,
        endpoint=Endpoint(backend="simulated", session=start, base_address=0, num_bytes=layout.pool_bytes),
        geometry=KvGeometry(
            model="simulated",
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=1,
            dtype="uint8",
            page_size=PAGE_SIZE,
        ),
        layout=layout,
        transfer_mode=shape.mode,
        page_filter=shape.page_filter,
        ownership=ownership,
        build="simulated",
        host_endpoint=host,
    )


def _layout(shape: Shape, role: Role, num_owners: int, coords: RankCoords, sizes: RankCoords) -> PoolLayout:
    heads = kv_heads_of(shape.num_kv_heads, sizes.tp, coords.tp)
    layers = stage_layers(shape.num_layers, sizes.pp, coords.pp)
    num_pages = shape.prefill_pages if role is Role.PREFILL else shape.decode_pages
    return PoolLayout(
        num_pages=num_pages // num_owners,
        first_head=heads.start,
        num_heads=len(heads),
        first_layer=layers.start,
        num_layers=len(layers),
        page_size=PAGE_SIZE,
        head_dim=1,
        itemsize=1,
    )
