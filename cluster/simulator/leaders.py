"""Real leader of a simulated replica, with its pages and tiers: one leader per DP rank."""

from collections.abc import Sequence

from cluster.simulator.scenario import PAGE_SIZE, TierShape
from cluster.simulator.surroundings import Surroundings
from cluster.spec.hicache_config import HicacheConfig, StorageBackendName, StorageConfig
from cluster.spec.lifecycle import Role
from cluster.spec.peer import Peer
from cluster.spec.registry import RankRow
from cluster.spec.step_messages import ScheduledRequest
from cluster.spec.strategy import Strategy
from transfer.plan import copies_of
from workers.cache.page_allocator import PageAllocator
from workers.cache.page_lists import Lifetimes
from workers.cache.prefix_tree import PrefixTree
from workers.context_parallel.cost_model import StrategyChoice, undivided
from workers.context_parallel.shard_plan import make_step_shape
from workers.hicache.tiers import Tiers
from workers.scheduler.decode import DecodeLeader
from workers.scheduler.decode_request import DecodeSettings
from workers.scheduler.leader import Leader
from workers.scheduler.prefill import PrefillLeader
from workers.scheduler.prefill_request import PrefillSettings
from workers.scheduler.steps import StepLimits, StepScheduler

MAX_REQUESTS = 4
TICKET_TIMEOUT_S = 5.0


def shard_of(rows: Sequence[RankRow], dp_rank: int) -> list[RankRow]:
    """Return the rows of one DP rank, by global rank."""
    return [row for row in rows if row.coords.dp == dp_rank]


def step_depth(row: RankRow) -> int:
    """Return the number of steps in flight, as in ``workers.build``."""
    num_stages = row.sizes.pp
    return num_stages + (num_stages > 1 and row.role is Role.PREFILL)


def make_leader(around: Surroundings, me: Peer, rows: Sequence[RankRow], dp_rank: int) -> tuple[Leader, PageAllocator]:
    """Create a DP rank's leader like ``workers.build``; ``rows`` are those of all ranks."""
    own = shard_of(rows, dp_rank)
    first = own[0]
    tree = PrefixTree(first.num_owners) if around.shape.prefix_cache else None
    allocator = PageAllocator(first.layout.num_pages, tree, first.num_owners, Lifetimes.of(first.geometry))
    tiers = _make_tiers(around.shape.tiers, tree, own)
    if first.role is Role.DECODE:
        return _make_decode_leader(around, me, rows, dp_rank, allocator, tiers), allocator
    return _make_prefill_leader(around, me, own, allocator, tiers), allocator


def _make_tiers(shape: TierShape | None, tree: PrefixTree | None, own: list[RankRow]) -> Tiers | None:
    if shape is None or tree is None:
        return None
    storage = StorageConfig(backend=StorageBackendName.FILES, prefetch=shape.prefetch)
    return Tiers(HicacheConfig(write=shape.write, storage=storage), tree, shape.host_pages, own, PAGE_SIZE)


def _limits(around: Surroundings, row: RankRow) -> StepLimits:
    return StepLimits(PAGE_SIZE, around.shape.chunk_tokens, MAX_REQUESTS, depth=step_depth(row))


def _make_decode_leader(
    around: Surroundings,
    me: Peer,
    rows: Sequence[RankRow],
    dp_rank: int,
    allocator: PageAllocator,
    tiers: Tiers | None,
) -> Leader:
    shape, first = around.shape, rows[0]
    own, num_copies = shard_of(rows, dp_rank), copies_of(first)
    settings = DecodeSettings(
        me=me,
        dp_rank=dp_rank,
        geometry=first.geometry,
        layout=first.layout,
        page_bytes=tuple(
            sum(row.layout.bytes_of(lifetime) for row in own) // num_copies
            for lifetime in range(first.layout.num_lifetimes)
        ),
        num_copies=num_copies,
        transfer_timeout_s=shape.transfer_timeout_s,
        quarantine_limit=shape.quarantine_limit,
        rank_addresses=tuple(row.address for row in rows),
        verify=shape.verify,
        settle_s=shape.settle_s,
    )
    steps = StepScheduler(allocator, _limits(around, first), undivided, tiers=tiers)
    return DecodeLeader(settings, steps, allocator, tiers=tiers)


def _make_prefill_leader(
    around: Surroundings, me: Peer, own: list[RankRow], allocator: PageAllocator, tiers: Tiers | None
) -> Leader:
    def choose(scheduled: Sequence[ScheduledRequest]) -> StrategyChoice:
        strategy = around.random.choice([Strategy.NONE, Strategy.ZIGZAG])
        return StrategyChoice(make_step_shape(scheduled, strategy, cp=own[0].sizes.cp), None, {})

    settings = PrefillSettings(
        me=me,
        row=own[0],
        rank_addresses=tuple(row.address for row in own),
        ticket_timeout_s=TICKET_TIMEOUT_S,
        settle_s=around.shape.settle_s,
    )
    steps = StepScheduler(allocator, _limits(around, own[0]), choose, tiers=tiers)
    return PrefillLeader(settings, steps, allocator, tiers=tiers)
