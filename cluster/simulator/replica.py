"""One start of a replica: its processes, and the real leader in the first of them."""

from collections.abc import Callable, Sequence

from cluster.simulator.bootstrap import Bootstrap
from cluster.simulator.leader_process import LeaderProcess
from cluster.simulator.network import machine_of
from cluster.simulator.rank_process import Follower, RankProcess
from cluster.simulator.scenario import PAGE_SIZE, TierShape
from cluster.simulator.surroundings import Surroundings
from cluster.spec.hicache_config import HicacheConfig, StorageBackendName, StorageConfig
from cluster.spec.lifecycle import Role
from cluster.spec.peer import Peer
from cluster.spec.registry import RankRow
from cluster.spec.strategy import Strategy
from workers.cache.page_allocator import PageAllocator
from workers.cache.prefix_tree import PrefixTree
from workers.context_parallel.cost_model import Choice, fixed
from workers.hicache.tiers import Tiers
from workers.scheduler.decode import DecodeLeader
from workers.scheduler.decode_request import DecodeSettings
from workers.scheduler.leader import Leader
from workers.scheduler.prefill import PrefillLeader
from workers.scheduler.prefill_request import PrefillSettings
from workers.scheduler.steps import StepLimits, StepScheduler

MAX_REQUESTS = 4
TICKET_TIMEOUT_S = 5.0


class Replica:
    """They live and die together, if the supervisor sees to it."""

    def __init__(
        self, around: Surroundings, bootstrap: Bootstrap, rows: list[RankRow], on_failed: Callable[[str], None]
    ) -> None:
        """``on_failed`` is called when a process has ended."""
        first = rows[0]
        self.machine = machine_of(first.address)
        self.incarnation = first.incarnation
        self._on_failed = on_failed
        me = Peer(replica=first.replica, incarnation=first.incarnation, address=first.address)
        tree = PrefixTree(first.num_owners) if around.shape.prefix_cache else None
        allocator = PageAllocator(first.layout.num_pages, tree, first.num_owners)
        tiers = _make_tiers(around.shape.tiers, tree, rows)
        leader = _make_leader(around, rows, allocator, me, tiers)
        self.leader = LeaderProcess(around, bootstrap, rows, me, leader, allocator, self._on_refused)
        self.leader.followers += [
            Follower(around, rows, cp_rank, me, allocator, self._on_step) for cp_rank in range(1, len(rows))
        ]

    @property
    def ranks(self) -> list[RankProcess]:
        """The processes by global rank."""
        return [self.leader, *self.leader.followers]

    @property
    def is_idle(self) -> bool:
        """Nothing is left of any request, on no rank."""
        return all(rank.is_idle for rank in self.ranks)

    def lose_rank(self, rank: int) -> bool:
        """One process dies; False if it was dead."""
        process = self.ranks[rank % len(self.ranks)]
        if process.is_dead:
            return False
        process.kill()
        self._on_failed(f"rank {process.address} died")
        return True

    def kill(self) -> None:
        """All processes die."""
        for process in self.ranks:
            process.kill()

    def _on_step(self) -> None:
        self.leader.when_running(self.leader.end_step)

    def _on_refused(self, reason: str) -> None:
        self.leader.kill()
        self._on_failed(reason)


def _make_tiers(shape: TierShape | None, tree: PrefixTree | None, rows: list[RankRow]) -> Tiers | None:
    if shape is None or tree is None:
        return None
    storage = StorageConfig(
        backend=StorageBackendName.FILES, prefetch=shape.prefetch, prefetch_base_s=0.5, prefetch_min_tokens=PAGE_SIZE
    )
    return Tiers(HicacheConfig(write=shape.write, storage=storage), tree, shape.host_pages, rows)


def _make_leader(
    around: Surroundings, rows: list[RankRow], allocator: PageAllocator, me: Peer, tiers: Tiers | None
) -> Leader:
    shape, first = around.shape, rows[0]
    limits = StepLimits(first.layout.page_size, shape.chunk_tokens, MAX_REQUESTS)
    if first.role is Role.DECODE:
        decode = DecodeSettings(
            me=me,
            geometry=first.geometry,
            layout=first.layout,
            page_bytes=first.layout.page_bytes,
            transfer_timeout_s=shape.transfer_timeout_s,
            quarantine_limit=shape.quarantine_limit,
            rank_addresses=tuple(row.address for row in rows),
            verify=shape.verify,
            settle_s=shape.settle_s,
        )
        steps = StepScheduler(allocator, limits, fixed(Strategy.NONE), tiers=tiers)
        return DecodeLeader(decode, steps, allocator, tiers=tiers)

    def choose(_extend_lens: Sequence[int], _prefix_lens: Sequence[int]) -> Choice:
        return Choice(around.random.choice([Strategy.NONE, Strategy.ZIGZAG]), None, {})

    prefill = PrefillSettings(
        me=me,
        row=first,
        rank_addresses=tuple(row.address for row in rows),
        ticket_timeout_s=TICKET_TIMEOUT_S,
        settle_s=shape.settle_s,
    )
    return PrefillLeader(prefill, StepScheduler(allocator, limits, choose, tiers=tiers), allocator, tiers=tiers)
