"""Rows of a simulated replica: a few layers and heads, with one byte for K and for V of each token."""

from cluster.simulator.scenario import PAGE_SIZE, Shape
from cluster.spec.config import TransferBackendName
from cluster.spec.ids import Incarnation, ReplicaId
from cluster.spec.kv import KvGeometry, KvGroup, KvPart, key_value_group
from cluster.spec.lifecycle import Role
from cluster.spec.pool import page_layout
from cluster.spec.ranks import coords_of, world_size
from cluster.spec.registry import Endpoint, KvOwnership, RankCoords, RankRow

_BYTE = "float8_e4m3fn"
"""Dtype of one byte."""


def make_rows(shape: Shape, replica: ReplicaId, incarnation: Incarnation, machine: str) -> list[RankRow]:
    """Return the rows of one start of a replica, by global rank."""
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
    num_pages = shape.prefill_pages if role is Role.PREFILL else shape.decode_pages
    geometry = geometry_of(shape)
    layout = page_layout(geometry, sizes, coords, num_pages // ownership.num_owners(sizes.cp))
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
        geometry=geometry,
        layout=layout,
        transfer_mode=shape.mode,
        ownership=ownership,
        build="simulated",
        host_endpoint=host,
    )


def geometry_of(shape: Shape) -> KvGeometry:
    """Return K and V in every layer; in some scenarios every second layer has a window, or one head of two unequal
    parts.
    """
    whole = range(0, shape.num_layers, 1 if shape.window is None else 2)
    groups = [key_value_group(whole, shape.num_kv_heads, 1, _BYTE)]
    if shape.window is not None:
        groups.append(key_value_group(range(1, shape.num_layers, 2), shape.num_kv_heads, 1, _BYTE, shape.window))
    if shape.has_extra_group:
        parts = (KvPart(name="latent", dim=2, dtype=_BYTE), KvPart(name="keys", dim=1, dtype=_BYTE))
        groups.append(KvGroup(name="extra", num_heads=1, layers=tuple(range(0, shape.num_layers, 2)), parts=parts))
    return KvGeometry(model="simulated", num_layers=shape.num_layers, groups=tuple(groups), page_size=PAGE_SIZE)
