"""Control of a replica's host and storage tiers by its leader. Sans I/O.

A page can be in device memory, host memory and storage at the same time, under one key. Only the leader knows where
pages are. It decides what to copy, and every rank does its part of each tier job.
"""

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from cluster.spec.config import TransferBackendName
from cluster.spec.hicache_config import HicacheConfig, StorageBackendName
from cluster.spec.ids import Room
from cluster.spec.registry import RankRecord
from cluster.spec.tiers import RankTiers, Tier, TierJob, TierJobKind, TierPage, TierState
from transfer.page_assignment import HostShare
from workers.cache.lifetimes import Lifetimes
from workers.cache.prefix_tree import PageJournal, PrefixTree
from workers.hicache.policy.host_index import HostIndex
from workers.hicache.policy.host_writer import HostWriter
from workers.hicache.policy.jobs import Breaker, Outcome, TierJobs
from workers.hicache.policy.prefetcher import Prefetcher
from workers.hicache.policy.storage_writer import StorageWriter


class Tiers:
    """Host and storage tiers of one replica, as seen by its leader."""

    def __init__(self, config: HicacheConfig, tree: PrefixTree, host_pages: int, records: Sequence[RankRecord]) -> None:
        """Create tiers with ``host_pages`` pages per rank. ``records`` describe all ranks of the replica."""
        self._lifetimes = Lifetimes.of(records[0].geometry)
        self.host = HostIndex(host_pages, HostShare.of(records[0]).num_owners, self._lifetimes)
        self._tree = tree
        self._addresses = [record.address for record in records]
        self._owners = {record.global_rank: HostShare.of(record).owner for record in records}
        self.jobs = TierJobs(len(records))
        self._loading: set[bytes] = set()
        """Keys of host pages that are being loaded."""
        self._host_writer = HostWriter(config.write, tree, self.host, self.jobs)
        self._writes, self._reads = Breaker(), Breaker()
        self._storage_writer = StorageWriter(config.write, self.host, self.jobs, self._writes)
        self.prefetcher = Prefetcher(
            config.storage.prefetch, self._lifetimes, self._is_here, self.host, self.jobs, self._reads
        )
        self._has_storage = config.storage.backend is not StorageBackendName.NONE
        self._is_attached = self._has_storage
        self._is_storing = self._is_draining = False
        self._num_stuck = 0
        is_own = self.host.num_owners == records[0].num_owners
        self.can_load_layerwise = records[0].sizes.dp == 1 and (is_own or _share_memory(records))
        """True if there is one DP rank, and each rank finds its pages on its own host, so that no copy can fail."""

    def advance(self, now_s: float) -> list[tuple[str, TierJob]]:
        """Submit jobs that are due after an event. Return the jobs to send as (address, job) pairs."""
        stuck = self.jobs.stuck_pages(now_s)
        self._reads.note_hangs(hangs=stuck[TierJobKind.LOOK_UP] + stuck[TierJobKind.FETCH] > 0)
        self._writes.note_hangs(hangs=stuck[TierJobKind.STORE] > 0)
        self._num_stuck = stuck[TierJobKind.FETCH] + stuck[TierJobKind.STORE]
        self._host_writer.advance()
        saved = self._host_writer.take_saved()
        if self._is_attached:
            for key in saved:
                self._storage_writer.note_saved(key)
            self._storage_writer.advance(now_s)
        self._is_storing = self._is_attached and not self._writes.is_open(now_s) and self._has_more_to_store()
        return [(address, job) for job in self.jobs.take_outgoing(now_s) for address in self._addresses]

    def expect(self, room: Room, keys: Sequence[bytes], now_s: float) -> None:
        """Prefetch pages for a new request that starts with these keys, if that is worthwhile."""
        num_here = self._lifetimes.longest_prefix(keys, self._tree.count(keys), self._is_here)
        used = [*keys, *self._lifetimes.prefix_keys(keys[:num_here])[num_here:]]
        # Fetched pages must not evict pages that the request will find here.
        self.host.touch(used)
        if not self._is_attached:
            return
        self._storage_writer.note_used(used, now_s)
        if num_here < len(keys):
            self.prefetcher.expect(room, keys, num_here, now_s)

    def note_hits(self, keys: Sequence[bytes]) -> None:
        """Record that a request starts after these cached pages."""
        self._host_writer.note_hits(self._lifetimes.prefix_keys(keys))

    def note_received(self, keys: Sequence[bytes]) -> None:
        """Record newly cached pages from a replica that saves them itself."""
        self._host_writer.note_received(self._lifetimes.prefix_keys(keys))

    def is_loading(self, key: bytes) -> bool:
        return key in self._loading

    def load(
        self,
        prefix: Sequence[bytes],
        pages: Sequence[TierPage],
        on_end: Callable[[bool], None],
        *,
        is_layerwise: bool = False,
    ) -> int:
        """Load a prefix's missing pages from host memory into device pages, which their sequence holds until the end.

        Return the number of positions whose pages came from storage. ``on_end`` receives whether all pages were loaded.
        A layerwise load runs during the next step, which waits for each layer.
        """
        pages = [replace(page, host=self.host.page_of(page.key)) for page in pages]
        wanted = [page.key for page in pages]
        self.host.hold(wanted)
        self.host.touch(self._lifetimes.prefix_keys(prefix))
        fetched = self.host.note_used(wanted)
        self._loading.update(wanted)

        def on_loaded(outcome: Outcome) -> None:
            self.host.release(wanted)
            self._loading.difference_update(wanted)
            on_end(all(outcome.done))

        self.jobs.submit(TierJobKind.LOAD, pages, on_loaded, is_layerwise=is_layerwise)
        return len({page.depth for page, is_fetched in zip(pages, fetched, strict=True) if is_fetched})

    def keys_below(self) -> dict[Tier, list[bytes]]:
        """Return the keys of the pages in host memory and of the pages that this replica has stored."""
        return {Tier.HOST: self.host.filled_keys(), Tier.STORAGE: self._storage_writer.stored_keys}

    @property
    def journals(self) -> dict[Tier, PageJournal]:
        return {Tier.HOST: self.host.journal, Tier.STORAGE: self._storage_writer.journal}

    def attach(self, *, is_attached: bool) -> None:
        """Attach the configured storage, if any, or detach it. Open jobs continue."""
        if is_attached and not self._is_attached:
            self._storage_writer.doubt()
        self._is_attached = is_attached and self._has_storage
        self.drain(is_draining=self._is_draining)

    def drain(self, *, is_draining: bool) -> None:
        """Start or stop storing all pages that only this replica has, since the replica may end soon."""
        self._is_draining = is_draining
        self._storage_writer.drain(is_draining=is_draining)
        self._host_writer.drain(is_draining=is_draining and self._is_attached)

    def refusal_of_storage(self) -> str:
        return "" if self._has_storage else "no storage is configured (hicache.storage.backend)"

    def pin(self, keys: Sequence[bytes], *, is_pinned: bool) -> None:
        """Pin or unpin a prompt's current and future pages in host memory, under every write policy."""
        self.host.pin(keys, is_pinned=is_pinned)
        self._host_writer.note_pinned(self._lifetimes.prefix_keys(keys))

    def num_pinned_of(self, keys: Sequence[bytes]) -> int:
        return sum(key in self.host.pins and self.host.page_of(key) is not None for key in keys)

    def state(self) -> TierState:
        return TierState(
            host_pages=self.host.num_pages,
            used_host_pages=self.host.num_used,
            num_pinned=self.host.num_pinned,
            num_evicted=sum(self.host.num_evicted),
            num_lost=self._host_writer.num_lost + self._storage_writer.num_lost,
            num_late=self.prefetcher.num_late,
            num_stuck=self._num_stuck,
            num_waiting=self._host_writer.num_waiting
            + self._host_writer.num_device_only
            + self._storage_writer.num_waiting,
            is_attached=self._is_attached,
            is_storing=self._is_storing,
            num_opened=self._writes.num_opened + self._reads.num_opened,
            work=tuple(self.jobs.work.values()),
            ranks=tuple(self._rank_state(rank, owner) for rank, owner in self._owners.items()),
        )

    def _is_here(self, key: bytes) -> bool:
        return self._tree.page_of(key) is not None or self.host.has(key)

    def _rank_state(self, global_rank: int, owner: int) -> RankTiers:
        return RankTiers(
            global_rank=global_rank,
            host_pages=self.host.num_pages // self.host.num_owners,
            used_host_pages=self.host.num_used_of(owner),
            num_evicted=self.host.num_evicted[owner],
            num_open=self.jobs.num_unreported(global_rank),
            storage=self.jobs.storage.get(global_rank),
        )

    def _has_more_to_store(self) -> bool:
        num_open = self.jobs.num_open(TierJobKind.SAVE) + self.jobs.num_open(TierJobKind.STORE)
        return num_open + self._host_writer.num_waiting + self._storage_writer.num_waiting > 0


def _share_memory(records: Sequence[RankRecord]) -> bool:
    """Return whether ranks can access each other's host memory without a network."""
    endpoints = [record.host_endpoint for record in records]
    return all(each is not None and each.backend == TransferBackendName.SHARED_MEMORY for each in endpoints)
