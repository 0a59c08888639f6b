"""The tiers below the device cache of one replica, as its leader sees them. Sans I/O.

A page may be in device memory, in host memory and in storage at once; it has the same key everywhere. The leader
decides what is copied where, and every rank does its part of it.
"""

from collections.abc import Sequence

from cluster.spec.config import TransferBackendName
from cluster.spec.hicache_config import HicacheConfig, StorageBackendName
from cluster.spec.ids import Room
from cluster.spec.registry import KvOwnership, RankRow
from cluster.spec.tiers import MoveKind, MovePages, PagesMoved, RankTiers, Tier, TierState
from workers.cache.page_journal import PageJournal
from workers.cache.prefix_tree import PrefixTree
from workers.hicache.breaker import Breaker
from workers.hicache.host_index import HostIndex
from workers.hicache.loader import Loader
from workers.hicache.orders import Orders
from workers.hicache.prefetcher import Prefetcher
from workers.hicache.saver import Saver
from workers.hicache.storer import Storer


class Tiers:
    """What a leader asks of the tiers, and tells them."""

    def __init__(self, config: HicacheConfig, tree: PrefixTree, host_pages: int, rows: Sequence[RankRow]) -> None:
        """``host_pages`` are those of one rank, ``rows`` all ranks of the replica."""
        self.host = HostIndex(host_pages, rows[0].sizes.cp)
        self._tree = tree
        self._addresses = [row.address for row in rows]
        self._owners = {row.global_rank: row.coords.cp for row in rows}
        self._orders = Orders(len(rows))
        self.loader = Loader(self.host, self._orders)
        self._saver = Saver(config.write, config.selective_hits, tree, self.host, self._orders)
        self._writes, self._reads = Breaker(), Breaker()
        self._storer = Storer(config.write, self.host, self._orders, self._writes)
        page_size = rows[0].layout.page_size
        self._prefetcher = Prefetcher(config.storage, page_size, self.host, self._orders, self._reads)
        self._has_storage = config.storage.backend is not StorageBackendName.NONE
        self._is_attached = self._has_storage
        self._is_storing = self._is_draining = False
        self._num_stuck = 0
        sizes, ownership = rows[0].sizes, rows[0].ownership
        is_own = sizes.cp == 1 or ownership is KvOwnership.SHARDED
        self.can_join = sizes.dp == 1 and (is_own or _share_memory(rows))
        """Each rank has what it needs in memory of its own host, so that no copy fails; no DP rank waits with it."""

    def on_answer(self, answer: PagesMoved, now_s: float) -> bool:
        """Take in what one rank made of an order; False for one that belongs to nothing."""
        return self._orders.on_answer(answer, now_s)

    def advance(self, now_s: float) -> list[tuple[str, MovePages]]:
        """Go on after anything that happened; what is to be sent, as (address, message)."""
        stuck = self._orders.stuck(now_s)
        self._reads.note_hangs(hangs=stuck[MoveKind.LOOK_UP] + stuck[MoveKind.FETCH] > 0)
        self._writes.note_hangs(hangs=stuck[MoveKind.STORE] > 0)
        self._num_stuck = stuck[MoveKind.FETCH] + stuck[MoveKind.STORE]
        self._saver.advance()
        saved = self._saver.take_saved()
        if self._is_attached:
            for key in saved:
                self._storer.note_saved(key)
            self._storer.advance(now_s)
        self._is_storing = self._is_attached and not self._writes.is_open(now_s) and self._has_more_to_store()
        return [(address, order) for order in self._orders.take_outgoing(now_s) for address in self._addresses]

    def expect(self, room: Room, keys: Sequence[bytes], now_s: float) -> None:
        """A request has come that will begin with these pages: have them read from storage, as far as that helps."""
        # What is fetched for this request and others must not push out what it will find here.
        self.host.touch(keys)
        if not self._is_attached:
            return
        self._storer.note_used(keys, now_s)
        num_here = self._tree.count(keys)
        num_here += len(self.host.find(keys[num_here:]))
        if num_here < len(keys):
            self._prefetcher.expect(room, keys, num_here, now_s)

    def is_waiting(self, room: Room, now_s: float) -> bool:
        """Whether a request is to wait for pages that are read from storage."""
        return self._prefetcher.is_waiting(room, now_s)

    def next_deadline_s(self) -> float | None:
        """When a request will wait no longer, if any waits."""
        return self._prefetcher.next_deadline_s()

    def forget(self, room: Room, now_s: float) -> None:
        """A request starts, or will not."""
        self._prefetcher.forget(room, now_s)

    def note_hits(self, keys: list[bytes]) -> None:
        """Device pages were found by a request."""
        self._saver.note_hits(keys)

    def note_received(self, keys: list[bytes]) -> None:
        """Pages that are now cached came from a replica that keeps them itself."""
        self._saver.note_received(keys)

    def take_joining(self) -> MovePages | None:
        """The order that the next step takes along, if there is one."""
        return self._orders.take_joining()

    def keys_below(self) -> dict[Tier, list[bytes]]:
        """What these tiers have, as far as this replica knows: of storage what it has stored."""
        return {Tier.HOST: self.host.filled_keys(), Tier.STORAGE: self._storer.stored_keys}

    @property
    def journals(self) -> dict[Tier, PageJournal]:
        """What has come to these tiers and gone from them."""
        return {Tier.HOST: self.host.journal, Tier.STORAGE: self._storer.journal}

    def attach(self, *, is_attached: bool) -> None:
        """Use storage from now on, if there is any, or leave it alone; what is under way goes on."""
        if is_attached and not self._is_attached:
            self._storer.doubt()
        self._is_attached = is_attached and self._has_storage
        self.drain(is_draining=self._is_draining)

    def drain(self, *, is_draining: bool) -> None:
        """The replica may end soon: give storage all that only its memory has; or go on by the policy."""
        self._is_draining = is_draining
        self._storer.drain(is_draining=is_draining)
        self._saver.drain(is_draining=is_draining and self._is_attached)

    def refusal_to_pin(self, keys: Sequence[bytes]) -> str:
        """Why a prompt may not be pinned; empty if it may."""
        return self.host.pins.refusal(keys)

    def refusal_of_storage(self) -> str:
        """Why storage can be neither attached nor detached; empty where there is one."""
        return "" if self._has_storage else "no storage is configured (hicache.storage.backend)"

    def pin(self, keys: Sequence[bytes], *, is_pinned: bool) -> None:
        """Keep a prompt's pages in host memory, under every policy: those there, those on the device, those to come.

        Or give them up as any other.
        """
        self.host.pin(keys, is_pinned=is_pinned)
        self._saver.note_pinned(keys)

    def num_pinned_of(self, keys: Sequence[bytes]) -> int:
        """Those of these pages that are in host memory and stay there."""
        return sum(key in self.host.pins and self.host.page_of(key) is not None for key in keys)

    def state(self) -> TierState:
        """What the heartbeat tells."""
        return TierState(
            host_pages=self.host.num_pages,
            used_host_pages=self.host.num_used,
            num_pinned=self.host.num_pinned,
            num_evicted=sum(self.host.num_evicted),
            num_lost=self._saver.num_lost + self._storer.num_lost,
            num_late=self._prefetcher.num_late,
            num_stuck=self._num_stuck,
            num_waiting=self._saver.num_waiting + self._saver.num_left + self._storer.num_waiting,
            is_attached=self._is_attached,
            is_storing=self._is_storing,
            num_opened=self._writes.num_opened + self._reads.num_opened,
            work=self._orders.tally.work,
            ranks=tuple(self._rank_state(rank, owner) for rank, owner in self._owners.items()),
        )

    def _rank_state(self, global_rank: int, owner: int) -> RankTiers:
        return RankTiers(
            global_rank=global_rank,
            host_pages=self.host.num_pages // self.host.num_owners,
            used_host_pages=self.host.num_used_of(owner),
            num_evicted=self.host.num_evicted[owner],
            num_open=self._orders.num_unanswered(global_rank),
            storage=self._orders.tally.storage.get(global_rank),
        )

    def _has_more_to_store(self) -> bool:
        num_open = self._orders.num_open(MoveKind.SAVE) + self._orders.num_open(MoveKind.STORE)
        return num_open + self._saver.num_waiting + self._storer.num_waiting > 0

    def flush(self) -> None:
        """Forget what host memory holds, as far as nobody needs it."""
        self.host.flush()

    def check_integrity(self) -> None:
        """Prove that no host page is lost."""
        self.host.check_integrity()


def _share_memory(rows: Sequence[RankRow]) -> bool:
    """Whether ranks reach each other's host memory without a network in between."""
    endpoints = [row.host_endpoint for row in rows]
    return all(each is not None and each.backend == TransferBackendName.SHARED_MEMORY for each in endpoints)
