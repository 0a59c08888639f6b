"""A leader's caches and the memory of its ranks, which run at their own pace. A page contains the key of its tokens."""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from cluster.spec.hicache_config import HicacheConfig, PrefetchPolicy
from cluster.spec.ids import Role, Room
from cluster.spec.kv import KvGeometry, key_value_group, lifetime_key, owner_base, page_keys
from cluster.spec.registry import KvOwnership, RankRecord
from cluster.spec.tiers import TierJob, TierJobKind, TierJobResult, TierPage
from tests.fakes.paged_ranks import record
from workers.cache.lifetimes import Lifetimes, PageLists, live_pages, tier_page
from workers.cache.page_allocator import PageAllocator
from workers.cache.prefix_tree import PrefixTree
from workers.hicache.policy.prefetcher import BASE_S, LONGEST_S, S_PER_1K_TOKENS
from workers.hicache.tiers import Tiers

PAGE_SIZE = 2
MOST_ROUNDS = 2000
"""Rounds in which all started work ends if nothing new arrives."""

Request = tuple[PageLists, list[bytes]]
"""Pages of a request and the keys of its tokens."""


@dataclass
class Step:
    """Computation of one request: pages that it reads, and pages that it writes with their keys."""

    read: dict[int, bytes]
    written: dict[int, bytes]


@dataclass
class FakeRank:
    """One rank, with steps and jobs in one queue. A job waits for earlier jobs of its kind."""

    cp_rank: int
    cp: int
    ownership: KvOwnership
    device: dict[int, bytes] = field(default_factory=dict)
    host: dict[int, bytes] = field(default_factory=dict)
    stored: dict[bytes, bytes] = field(default_factory=dict)
    inbox: deque[Step | TierJob] = field(default_factory=deque)
    copies: deque[TierJob] = field(default_factory=deque)

    def has(self, page: int) -> bool:
        return self.ownership is KvOwnership.REPLICATED or page % self.cp == self.cp_rank

    def compute(self, step: Step) -> None:
        self.device.update({page: key for page, key in step.written.items() if self.has(page)})
        for page, key in step.read.items():
            is_right = not self.has(page) or self.device.get(page) == key
            assert is_right, f"rank {self.cp_rank} attends to a page with other tokens"


class TierWorld:
    """Requests arrive and end, ranks proceed one message at a time, and copies may fail."""

    def __init__(
        self,
        *,
        pages_per_owner: int,
        host_pages: int,
        cp: int,
        ownership: KvOwnership,
        config: HicacheConfig,
        seed: int,
        window: int | None = None,
    ) -> None:
        self.random = random.Random(seed)
        self.num_owners = ownership.num_owners(cp)
        self.ranks = [FakeRank(rank, cp, ownership) for rank in range(cp)]
        self._sizes = pages_per_owner, host_pages
        self._config, self._window = config, window
        self._num_rooms = 0
        self.now_s = 0.0
        self.num_written = 0
        self.num_found: list[int] = []
        """Number of cached pages with which each request started."""
        self.restart()

    def restart(self) -> None:
        """Restart the replica, which keeps only its storage."""
        pages_per_owner, host_pages = self._sizes
        self.ranks = [FakeRank(rank.cp_rank, rank.cp, rank.ownership, stored=rank.stored) for rank in self.ranks]
        records = records_of(len(self.ranks), self.ranks[0].ownership, self._window)
        self.lifetimes = Lifetimes.of(records[0].geometry)
        self.tree = PrefixTree(self.num_owners)
        self.allocator = PageAllocator(pages_per_owner, self.tree, self.num_owners, self.lifetimes)
        self.tiers = Tiers(self._config, self.tree, host_pages, records)
        self.tiers.prefetcher.min_tokens = 1
        self.waiting: list[tuple[Room, list[int], float]] = []
        """Requests that wait for storage, and since when."""
        self.requests: list[Request] = []
        self.loading: list[Request] = []

    def submit(self, tokens: list[int]) -> None:
        """Add a request, which waits for its pages from storage as long as the policy allows."""
        self._num_rooms += 1
        keys = page_keys(tokens, PAGE_SIZE)
        if keys:
            self.waiting.append((Room(self._num_rooms), tokens, self.now_s))
            self.tiers.expect(Room(self._num_rooms), keys, self.now_s)
            self.advance()

    def start_waiting(self) -> None:
        """Start the requests that no longer wait. Those without free pages end."""
        for request in [
            request for request in self.waiting if not self.tiers.prefetcher.is_waiting(request[0], self.now_s)
        ]:
            self.waiting.remove(request)
            room, tokens, _ = request
            self.start(tokens)
            self.tiers.prefetcher.forget(room, self.now_s)
            self.advance()
        for room, tokens, since_s in self.waiting:
            assert self.now_s - since_s < self._longest_wait_s(len(tokens)), f"{room} waits too long for storage"

    def start(self, tokens: list[int], *, uses_host: bool = True) -> None:
        """Allocate pages for a request, and compute it once its cached pages have been loaded."""
        keys = page_keys(tokens, PAGE_SIZE)
        base = owner_base(tokens, PAGE_SIZE, self.num_owners)
        pages = self.allocator.find(keys, self.tiers.host.has) if uses_host else self.allocator.find(keys)
        prefix, gaps = keys[: len(pages[0])], self.lifetimes.gaps(pages, len(keys))
        demands = [(gap.end - gap.first, base + gap.first) for gap in gaps]
        if not keys or not self.allocator.can_allocate(demands, live_pages(pages)):
            return
        for gap, new in zip(gaps, self.allocator.allocate(demands, live_pages(pages)), strict=True):
            pages[gap.lifetime][gap.first : gap.end] = new
        self.tiers.note_hits(prefix)
        wanted = [
            tier_page(prefix, gap.lifetime, at, pages[gap.lifetime][at])
            for gap in gaps
            for at in range(gap.first, min(gap.end, len(prefix)))
        ]
        request = pages, keys
        if wanted:
            self.loading.append(request)
            on_end = partial(self._loaded, request, tokens, len(prefix))
            self.tiers.load(prefix, wanted, on_end)
        else:
            self._compute(request, len(prefix))
        self.advance()

    def finish(self, number: int) -> None:
        if self.requests:
            pages, keys = self.requests.pop(number % len(self.requests))
            self.allocator.keep(pages, keys)
            self.advance()

    def num_in_host(self, tokens: list[int]) -> int:
        """Return how many pages of a prefix host memory alone can provide."""
        return self.lifetimes.longest_prefix(page_keys(tokens, PAGE_SIZE), 0, self.tiers.host.has)

    def step(self, number: int, *, fails: bool) -> None:
        """Let one rank handle its next message or copy."""
        self.now_s += 0.05
        rank = self.ranks[number % len(self.ranks)]
        if rank.inbox and (not rank.copies or self.random.random() < 0.5):
            message = rank.inbox.popleft()
            if isinstance(message, Step):
                rank.compute(message)
            else:
                rank.copies.append(message)
        elif rank.copies:
            kind = self.random.choice(sorted({job.kind for job in rank.copies}))
            job = next(job for job in rank.copies if job.kind is kind)
            rank.copies.remove(job)
            is_done = [self._move(rank, job.kind, page, fails=fails) for page in job.pages]
            failures = {"error": 1} if fails else {}
            result = TierJobResult(job_id=job.job_id, global_rank=rank.cp_rank, done=is_done, failures=failures)
            assert self.tiers.jobs.on_result(result, self.now_s)
            self.advance()

    def drain(self) -> None:
        num_rounds = 0
        while self.waiting or any(rank.inbox or rank.copies for rank in self.ranks):
            num_rounds += 1
            assert num_rounds < MOST_ROUNDS, "copies are made without end, though nothing more comes"
            for number in range(len(self.ranks)):
                self.step(number, fails=False)
            self.start_waiting()

    def wipe(self) -> None:
        """Delete everything in storage without a notice."""
        for rank in self.ranks:
            rank.stored.clear()

    def advance(self) -> None:
        for address, message in self.tiers.advance(self.now_s):
            assert isinstance(message, TierJob)
            self.ranks[int(address)].inbox.append(message)
        self.check()

    def check(self) -> None:
        """Check that every id is where it should be, and that every indexed host page has the right bytes."""
        held = [page for pages, _ in (*self.requests, *self.loading) for page in live_pages(pages)]
        self.allocator.check_integrity(held)
        self.tiers.host.check_integrity()
        for key in self.tiers.host.filled_keys():
            page = self.tiers.host.page_of(key)
            assert page is not None
            owner = self.ranks[page % len(self.ranks)]
            assert owner.host.get(page) == key, "a host page is found that holds other tokens"
        for rank in self.ranks:
            assert all(key == stored for key, stored in rank.stored.items()), "stored under the key of other tokens"

    def _longest_wait_s(self, num_tokens: int) -> float:
        storage = self._config.storage
        timeout_s = BASE_S + S_PER_1K_TOKENS * num_tokens / 1000
        longest_s = {PrefetchPolicy.BEST_EFFORT: 0.0, PrefetchPolicy.TIMEOUT: timeout_s}
        return longest_s.get(storage.prefetch, LONGEST_S)

    def _loaded(self, request: Request, tokens: list[int], num_found: int, is_done: bool) -> None:
        self.loading.remove(request)
        if is_done:
            self._compute(request, num_found)
        else:
            self.allocator.free(live_pages(request[0]))
            self.start(tokens, uses_host=False)

    def _compute(self, request: Request, first: int) -> None:
        """Compute a step on the leader's own rank before the leader continues."""
        pages, keys = request
        self.num_found.append(first)
        step = Step(
            _keyed(pages, keys, self.lifetimes.first_pages(first * PAGE_SIZE), first),
            _keyed(pages, keys, [first] * len(pages), len(keys)),
        )
        for rank in self.ranks:
            rank.inbox.append(step)
        while self.ranks[0].inbox:
            message = self.ranks[0].inbox.popleft()
            if isinstance(message, Step):
                self.ranks[0].compute(message)
            else:
                self.ranks[0].copies.append(message)
        self.requests.append(request)
        self.allocator.put_into_cache(pages, keys)

    def _move(self, rank: FakeRank, kind: TierJobKind, page: TierPage, *, fails: bool) -> bool:
        """Move one rank's part of a page. After a failure, the target has garbage, but storage has nothing."""
        is_owner = page.index % rank.cp == rank.cp_rank
        if kind is TierJobKind.LOOK_UP:
            return not fails and (page.key in rank.stored or not is_owner)
        assert page.host is not None
        assert page.host % rank.cp == page.index % rank.cp, "a host page with a foreign owner"
        match kind:
            case TierJobKind.SAVE if is_owner:
                assert page.device is not None
                rank.host[page.host] = b"torn" if fails else rank.device.get(page.device, b"")
            case TierJobKind.LOAD if page.device is not None and rank.has(page.device):
                rank.device[page.device] = b"torn" if fails else self.ranks[page.host % rank.cp].host[page.host]
            case TierJobKind.FETCH if is_owner:
                rank.host[page.host] = b"torn" if fails else rank.stored.get(page.key, b"torn")
                return not fails and page.key in rank.stored
            case TierJobKind.STORE if is_owner and not fails:
                self.num_written += page.key not in rank.stored
                rank.stored.setdefault(page.key, rank.host[page.host])
        return not fails


def _keyed(pages: PageLists, keys: Sequence[bytes], firsts: Sequence[int], end: int) -> dict[int, bytes]:
    """Return the keys of the pages in every lifetime, from its first position to ``end``."""
    return {
        pages[lifetime][at]: lifetime_key(keys[at], lifetime)
        for lifetime, first in enumerate(firsts)
        for at in range(first, end)
    }


def records_of(cp: int, ownership: KvOwnership, window: int | None = None) -> list[RankRecord]:
    """Return rank records with the fields that a leader reads. A rank's address is its number."""
    windows = (None,) if window is None else (None, window)
    groups = tuple(key_value_group([layer], 1, 1, "float32", each) for layer, each in enumerate(windows))
    geometry = KvGeometry(model="m", num_layers=len(groups), groups=groups, page_size=PAGE_SIZE)
    records = [record(Role.PREFILL, rank, cp, num_pages=1, ownership=ownership) for rank in range(cp)]
    layout = msgspec.structs.replace(records[0].layout, page_size=PAGE_SIZE)
    return [
        msgspec.structs.replace(record, address=str(record.global_rank), geometry=geometry, layout=layout)
        for record in records
    ]
