"""Factories for the parts of a worker."""

from collections.abc import Callable
from functools import partial

from cluster.channel import Outbox
from cluster.spec.clock import read_clock
from cluster.spec.ids import Role, Room
from cluster.spec.messages import RankTrace
from cluster.spec.registry import KvOwnership, RankRecord
from cluster.spec.version import VERSION
from cluster.spec.worker_spec import WorkerSpec
from transfer.sender import SenderThread
from workers.cache.lifetimes import Lifetimes
from workers.cache.page_allocator import PageAllocator
from workers.cache.prefix_tree import PrefixTree
from workers.context_parallel.chunk_sizes import efficient_share, even_chunk
from workers.context_parallel.strategy_chooser import StrategyChooser, undivided
from workers.handoff.kv_sender import KvSender
from workers.hicache.copier import Copier
from workers.hicache.storage.page_store import PageStore
from workers.hicache.storage.registry import make_storage
from workers.hicache.tier_worker import TierWorker
from workers.hicache.tiers import Tiers
from workers.memory.peer_memory import TierMemory
from workers.rank import Rank
from workers.scheduler.decode import DecodeLeader
from workers.scheduler.decode_request import DecodeSettings
from workers.scheduler.leader import DpLeader
from workers.scheduler.prefill import PrefillLeader
from workers.scheduler.prefill_request import PrefillSettings
from workers.scheduler.replica_leader import ReplicaLeader
from workers.scheduler.step_scheduler import StepLimits, StepScheduler, step_depth


def make_record(spec: WorkerSpec, rank: Rank, address: str) -> RankRecord:
    return RankRecord(
        replica=spec.replica,
        incarnation=spec.incarnation,
        coords=spec.coords,
        sizes=spec.sizes,
        global_rank=spec.global_rank,
        address=address,
        endpoint=rank.memory.region.endpoint,
        geometry=rank.geometry,
        layout=rank.layout,
        transfer_mode=spec.config.transfer.mode,
        ownership=spec.ownership,
        build=VERSION,
        host_endpoint=rank.host_region.endpoint if rank.host_region else None,
        device=rank.model.device.title,
    )


def make_leader(spec: WorkerSpec, rank: Rank, records: list[RankRecord]) -> ReplicaLeader:
    make = _make_prefill_leader if spec.role is Role.PREFILL else _make_decode_leader
    ahead = num_ahead(spec, rank)
    depth = step_depth(spec.role, spec.sizes.pp) + ahead
    longest = spec.config.model.longest_context(rank.model.config.max_position_embeddings)
    limits = StepLimits(
        rank.layout.page_size,
        spec.pool.chunk_tokens,
        spec.pool.max_requests,
        efficient_share=efficient_share(rank.model_shape, rank.rates, spec.sizes.cp, spec.pool.chunk_tokens),
        depth=depth,
        max_context_tokens=longest if spec.ownership is KvOwnership.SHARDED else None,
        runs_ahead=ahead > 0,
    )
    leaders = [make(spec, rank, records, dp_rank, limits) for dp_rank in range(spec.sizes.dp)]
    policy = spec.config.router.dp_policy
    return ReplicaLeader(leaders, spec.sizes, depth=depth, policy=policy)


def num_ahead(spec: WorkerSpec, rank: Rank) -> int:
    """Return the maximum number of earlier steps that may still be under way on a rank when it starts a step."""
    return int(spec.role is Role.DECODE and spec.sizes.pp == 1 and rank.runner.is_asynchronous)


def _make_allocator(spec: WorkerSpec, records: list[RankRecord]) -> tuple[PageAllocator, Tiers | None]:
    num_owners = records[0].num_owners
    tree = PrefixTree(num_owners) if spec.config.kv.prefix_cache else None
    # Stages may differ in the number of layers, and therefore in the number of pages.
    pages_per_owner, lifetimes = min(record.layout.num_pages for record in records), Lifetimes.of(records[0].geometry)
    allocator = PageAllocator(pages_per_owner, tree, num_owners, lifetimes)
    # The rank with the least host memory sets the size of the host tier.
    host_pages = min(
        record.host_endpoint.num_bytes // record.layout.page_bytes if record.host_endpoint else 0 for record in records
    )
    return allocator, Tiers(spec.config.hicache, tree, host_pages, records) if tree and host_pages else None


def _make_decode_leader(
    spec: WorkerSpec, rank: Rank, records: list[RankRecord], dp_rank: int, limits: StepLimits
) -> DpLeader:
    config, own = spec.config, [record for record in records if record.coords.dp == dp_rank]
    allocator, tiers = _make_allocator(spec, own)
    settings = DecodeSettings(
        me=records[0].peer,
        records=records,
        dp_rank=dp_rank,
        transfer_timeout_s=config.transfer.transfer_timeout_s,
        verify=config.verify_by(),
        settle_s=rank.backend.settle_s,
        clock=read_clock(),
    )
    scheduler = StepScheduler(allocator, limits, undivided, tiers=tiers)
    return DecodeLeader(settings, scheduler, rank.step_recorder.recorder)


def _make_prefill_leader(
    spec: WorkerSpec, rank: Rank, records: list[RankRecord], dp_rank: int, limits: StepLimits
) -> DpLeader:
    prefill, own = spec.config.prefill, [record for record in records if record.coords.dp == dp_rank]
    allocator, tiers = _make_allocator(spec, own)
    settings = PrefillSettings(
        me=records[0].peer,
        record=own[0],
        rank_addresses=tuple(record.address for record in own),
        settle_s=rank.backend.settle_s,
        clock=read_clock(),
    )
    choose = StrategyChooser.of(prefill, rank.model_shape, rank.rates)
    chunk = even_chunk(rank.model_shape, rank.rates, spec.sizes.cp, prefill.chunk_tokens, spec.sizes.pp)
    scheduler = StepScheduler(allocator, limits, choose, chunk, tiers=tiers)
    return PrefillLeader(settings, scheduler, rank.step_recorder.recorder)


def make_tier_worker(
    spec: WorkerSpec,
    rank: Rank,
    records: list[RankRecord],
    open_outbox: Callable[[], Outbox],
    on_failure: Callable[[Exception], None],
) -> TierWorker | None:
    if rank.host_region is None:
        return None
    memory = TierMemory(rank.memory, rank.host_region)
    copier = Copier(records, spec.global_rank, memory, rank.backend)
    record, storage = records[spec.global_rank], make_storage(spec.config.hicache.storage, spec.host)
    store = PageStore(storage, record, rank.weights) if storage else None
    return TierWorker(copier, store, spec.global_rank, records[0].address, open_outbox, on_failure)


def make_kv_sender(
    spec: WorkerSpec, rank: Rank, records: list[RankRecord], outbox: Outbox, on_failure: Callable[[Exception], None]
) -> KvSender:
    return KvSender(
        prefill=records[0].peer,
        record=records[spec.global_rank],
        region=rank.memory.region.buffer,
        config=spec.config.transfer.model_copy(update={"verify": spec.config.verify_by()}),
        outbox=outbox,
        start_writer=partial(SenderThread, rank.backend, rank.memory.region, on_failure=on_failure),
        recorder=rank.step_recorder.recorder,
        memory=rank.memory,
    )


def make_rank_trace(spec: WorkerSpec, rank: Rank, room: Room, now_s: float) -> RankTrace:
    """Remove and return this rank's trace of a request."""
    log = rank.step_recorder.recorder.take(room, now_s)
    return RankTrace(
        room=room,
        replica=spec.replica,
        global_rank=spec.global_rank,
        clock=read_clock(),
        intervals=log.intervals,
        num_left_out=log.num_left_out,
    )
