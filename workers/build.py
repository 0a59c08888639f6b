"""Puts the parts of a worker together from its spec."""

from functools import partial

from cluster.channel import Outbox
from cluster.spec.ids import Room
from cluster.spec.lifecycle import Role
from cluster.spec.messages import Peer, Timeline
from cluster.spec.registry import RankRow
from cluster.spec.strategy import Strategy
from cluster.spec.timeline import read_clock
from cluster.spec.version import VERSION
from cluster.spec.worker_spec import WorkerSpec
from transfer.sender import SenderThread
from workers.cache.page_allocator import PageAllocator
from workers.cache.prefix_tree import PrefixTree
from workers.context_parallel.cost_model import StrategyChooser, fixed
from workers.kv_sender import KvSender
from workers.rank import Rank
from workers.scheduler.decode import DecodeLeader
from workers.scheduler.decode_request import DecodeSettings
from workers.scheduler.leader import Leader
from workers.scheduler.prefill import PrefillLeader
from workers.scheduler.prefill_request import PrefillSettings
from workers.scheduler.step_time import even_chunk
from workers.scheduler.steps import StepLimits, StepScheduler


def make_row(spec: WorkerSpec, rank: Rank, address: str) -> RankRow:
    """What this rank tells the bootstrap service."""
    return RankRow(
        replica=spec.replica,
        role=spec.role,
        incarnation=spec.incarnation,
        coords=spec.coords,
        sizes=spec.sizes,
        global_rank=spec.global_rank,
        address=address,
        endpoint=rank.region.endpoint,
        geometry=rank.geometry,
        layout=rank.layout,
        transfer_mode=spec.config.transfer.mode,
        page_filter=spec.config.transfer.page_filter,
        ownership=spec.ownership,
        build=VERSION,
    )


def make_leader(spec: WorkerSpec, rank: Rank, rows: list[RankRow]) -> Leader:
    """The control state of the replica whose rank 0 this is."""
    config = spec.config
    me = Peer(replica=spec.replica, incarnation=spec.incarnation, address=rows[0].address)
    num_owners = rows[0].num_owners
    tree = PrefixTree(num_owners) if config.kv.prefix_cache else None
    allocator = PageAllocator(rank.layout.num_pages, tree, num_owners)
    if spec.role is Role.DECODE:
        limits = StepLimits(rank.layout.page_size, config.decode.chunk_tokens, config.decode.max_requests)
        settings = DecodeSettings(
            me=me,
            geometry=rank.geometry,
            layout=rank.layout,
            page_bytes=sum(row.layout.page_bytes for row in rows),
            transfer_timeout_s=config.transfer.transfer_timeout_s,
            quarantine_limit=config.transfer.quarantine_limit,
            settle_s=rank.backend.settle_s,
        )
        steps = StepScheduler(allocator, limits, fixed(Strategy.NONE))
        return DecodeLeader(settings, steps, allocator, rank.step_recorder.recorder)
    prefill = config.prefill
    limits = StepLimits(rank.layout.page_size, prefill.chunk_tokens, prefill.max_requests, prefill.oldest_share)
    choose = StrategyChooser(
        setting=config.prefill.strategy,
        cp=spec.sizes.cp,
        shape=rank.model_shape,
        rates=rank.rates,
        mode=config.prefill.mode,
        passing=config.prefill.passing,
    )
    return PrefillLeader(
        PrefillSettings(
            row=rows[0],
            rank_addresses=tuple(row.address for row in rows),
            ticket_timeout_s=config.transfer.ticket_timeout_s,
            settle_s=rank.backend.settle_s,
            request_timeout_s=config.router.request_timeout_s,
        ),
        StepScheduler(
            allocator,
            limits,
            choose,
            even_chunk(rank.model_shape, rank.rates, spec.sizes.cp, prefill.chunk_tokens),
        ),
        allocator,
        rank.step_recorder.recorder,
    )


def make_kv_sender(spec: WorkerSpec, rank: Rank, rows: list[RankRow]) -> KvSender:
    """What sends this rank's part of finished KV."""
    return KvSender(
        prefill=Peer(replica=spec.replica, incarnation=spec.incarnation, address=rows[0].address),
        row=rows[spec.global_rank],
        config=spec.config.transfer,
        outbox=Outbox(),
        start_writer=partial(SenderThread, rank.backend, rank.region, spec.config.transfer.batch_spans),
        recorder=rank.step_recorder.recorder,
    )


def make_timeline(spec: WorkerSpec, rank: Rank, room: Room, now_s: float) -> Timeline:
    """What this rank kept of a timed request, and keeps no longer."""
    log = rank.step_recorder.recorder.take(room, now_s)
    return Timeline(
        room=room,
        replica=spec.replica,
        incarnation=spec.incarnation,
        global_rank=spec.global_rank,
        clock=read_clock(),
        intervals=log.intervals,
        num_left_out=log.num_left_out,
    )
