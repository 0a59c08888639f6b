"""Rank records of a simulated replica, and the real leaders of its DP ranks."""

from collections.abc import Sequence

from cluster.simulator.environment import Environment
from cluster.simulator.scenario import PAGE_SIZE, Shape, TierShape
from cluster.spec.config import TransferBackendName
from cluster.spec.hicache_config import HicacheConfig, StorageBackendName, StorageConfig
from cluster.spec.ids import Incarnation, Peer, ReplicaId, Role, role_of
from cluster.spec.kv import KvGeometry, KvGroup, KvPart, key_value_group
from cluster.spec.memory import page_layout
from cluster.spec.ranks import coords_of, world_size
from cluster.spec.registry import AxisSizes, Endpoint, KvOwnership, RankRecord
from cluster.spec.step_messages import ScheduledRequest
from cluster.spec.strategy import Strategy
from workers.cache.lifetimes import Lifetimes
from workers.cache.page_allocator import PageAllocator
from workers.cache.prefix_tree import PrefixTree
from workers.context_parallel.shard_plan import make_step_shape
from workers.context_parallel.strategy_chooser import StrategyChoice, undivided
from workers.hicache.tiers import Tiers
from workers.scheduler.decode import DecodeLeader
from workers.scheduler.decode_request import DecodeSettings
from workers.scheduler.leader import DpLeader
from workers.scheduler.prefill import PrefillLeader
from workers.scheduler.prefill_request import PrefillSettings
from workers.scheduler.step_scheduler import StepLimits, StepScheduler, step_depth

_BYTE = "float8_e4m3fn"
MAX_REQUESTS = 4
TICKET_TIMEOUT_S = 5.0


def make_records(shape: Shape, replica: ReplicaId, incarnation: Incarnation, machine: str) -> list[RankRecord]:
    """Return the records of one incarnation of a replica, in order of global rank."""
    role = role_of(replica)
    ownership, num_pages = shape.ownership, shape.prefill_pages
    sizes = AxisSizes(dp=shape.dp, cp=shape.cp, tp=shape.tp, pp=shape.pp)
    if role is Role.DECODE:
        ownership, num_pages = KvOwnership.REPLICATED, shape.decode_pages
        sizes = AxisSizes(dp=shape.decode_dp, cp=1, tp=shape.decode_tp, pp=shape.decode_pp)
    geometry, records = geometry_of(shape), []
    for global_rank in range(world_size(sizes)):
        start = f"{machine}/{replica}.{incarnation}.{global_rank}"
        coords = coords_of(global_rank, sizes)
        layout = page_layout(geometry, sizes, coords, num_pages // ownership.num_owners(sizes.cp))
        host = None
        if shape.tiers is not None and shape.prefix_cache:
            backend = TransferBackendName.SHARED_MEMORY if shape.tiers.shares_host else "simulated"
            num_bytes = shape.tiers.host_pages * layout.page_bytes
            host = Endpoint(backend=backend, session=start, base_address=0, num_bytes=num_bytes)
        record = RankRecord(
            replica=replica,
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
        records.append(record)
    return records


def geometry_of(shape: Shape) -> KvGeometry:
    """Return a geometry with K and V in every layer. Every second layer may have a window or an extra KV group."""
    whole = range(0, shape.num_layers, 1 if shape.window is None else 2)
    groups = [key_value_group(whole, shape.num_kv_heads, 1, _BYTE)]
    if shape.window is not None:
        groups.append(key_value_group(range(1, shape.num_layers, 2), shape.num_kv_heads, 1, _BYTE, shape.window))
    if shape.has_extra_group:
        parts = (KvPart(name="latent", dim=2, dtype=_BYTE), KvPart(name="keys", dim=1, dtype=_BYTE))
        groups.append(KvGroup(name="extra", num_heads=1, layers=tuple(range(0, shape.num_layers, 2)), parts=parts))
    return KvGeometry(model="simulated", num_layers=shape.num_layers, groups=tuple(groups), page_size=PAGE_SIZE)


def shard_of(records: Sequence[RankRecord], dp_rank: int) -> list[RankRecord]:
    return [record for record in records if record.coords.dp == dp_rank]


def make_leader(env: Environment, records: Sequence[RankRecord], dp_rank: int) -> tuple[DpLeader, PageAllocator]:
    """Create the leader of a DP rank, as ``workers.build`` does. ``records`` lists all ranks of the replica."""
    own = shard_of(records, dp_rank)
    first = own[0]
    tree = PrefixTree(first.num_owners) if env.shape.prefix_cache else None
    allocator = PageAllocator(first.layout.num_pages, tree, first.num_owners, Lifetimes.of(first.geometry))
    tiers = _make_tiers(env.shape.tiers, tree, own)
    if first.role is Role.DECODE:
        return _make_decode_leader(env, records, dp_rank, allocator, tiers), allocator
    return _make_prefill_leader(env, records[0].peer, own, allocator, tiers), allocator


def _make_tiers(shape: TierShape | None, tree: PrefixTree | None, own: list[RankRecord]) -> Tiers | None:
    if shape is None or tree is None:
        return None
    storage = StorageConfig(backend=StorageBackendName.FILES, prefetch=shape.prefetch)
    tiers = Tiers(HicacheConfig(write=shape.write, storage=storage), tree, shape.host_pages, own)
    tiers.prefetcher.min_tokens = PAGE_SIZE
    return tiers


def _limits(env: Environment, record: RankRecord) -> StepLimits:
    return StepLimits(PAGE_SIZE, env.shape.chunk_tokens, MAX_REQUESTS, depth=step_depth(record.role, record.sizes.pp))


def _make_decode_leader(
    env: Environment,
    records: Sequence[RankRecord],
    dp_rank: int,
    allocator: PageAllocator,
    tiers: Tiers | None,
) -> DpLeader:
    shape = env.shape
    settings = DecodeSettings(
        me=records[0].peer,
        records=records,
        dp_rank=dp_rank,
        transfer_timeout_s=shape.transfer_timeout_s,
        quarantine_limit=shape.quarantine_limit,
        verify=shape.verify,
        settle_s=shape.settle_s,
    )
    scheduler = StepScheduler(allocator, _limits(env, records[0]), undivided, tiers=tiers)
    return DecodeLeader(settings, scheduler)


def _make_prefill_leader(
    env: Environment, me: Peer, own: list[RankRecord], allocator: PageAllocator, tiers: Tiers | None
) -> DpLeader:
    def choose(scheduled: Sequence[ScheduledRequest]) -> StrategyChoice:
        strategy = env.random.choice([Strategy.NONE, Strategy.ZIGZAG])
        return StrategyChoice(make_step_shape(scheduled, strategy, cp=own[0].sizes.cp), None)

    settings = PrefillSettings(
        me=me,
        record=own[0],
        rank_addresses=tuple(record.address for record in own),
        ticket_timeout_s=TICKET_TIMEOUT_S,
        settle_s=env.shape.settle_s,
    )
    scheduler = StepScheduler(allocator, _limits(env, own[0]), choose, tiers=tiers)
    return PrefillLeader(settings, scheduler)
