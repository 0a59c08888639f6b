"""Reports of a replica's cached prefixes to routers: first all prefixes, then changes. Sans I/O.

Each router gets a separate numbered stream. A router that has just started or missed a number subscribes again and gets
all prefixes. The reports affect only routing.
"""

import itertools
from dataclasses import dataclass

from cluster.spec.ids import Peer, ReplicaId
from cluster.spec.kv import lifetime_of
from cluster.spec.messages import KvEvents, Message
from cluster.spec.registry import TableSnapshot
from cluster.spec.tiers import Tier
from workers.cache.page_allocator import PageAllocator
from workers.cache.prefix_tree import PageJournal
from workers.hicache.tiers import Tiers

MAX_KEYS = 65_536
"""Maximum number of keys per message, about 1 MB."""


@dataclass(slots=True)
class _Subscriber:
    router: Peer
    next_number: int = 0


class PageReporter:
    """Reporter of one leader's cache to its subscribed routers."""

    def __init__(self, me: Peer, allocator: PageAllocator, tiers: Tiers | None = None) -> None:
        self._tiers = tiers
        self._me = me
        self._allocator = allocator
        self._journal = allocator.new_journal()
        self._subscribers: dict[ReplicaId, _Subscriber] = {}

    def subscribe(self, router: Peer) -> list[tuple[str, Message]]:
        """Return reports of all cached prefixes for a router. The router's earlier incarnations get no more reports."""
        known = self._subscribers.get(router.replica)
        if known is not None and known.router.incarnation > router.incarnation:
            return []
        self._subscribers.pop(router.replica, None)
        # Otherwise, a page that is new now and gone at the next call would never be reported as gone.
        reports = self.changes()
        subscriber = self._subscribers[router.replica] = _Subscriber(router)
        reports += self._report(subscriber, Tier.DEVICE, self._allocator.cached_keys(), [])
        for tier, keys in self._tiers.keys_below().items() if self._tiers else ():
            reports += self._report(subscriber, tier, _chained(keys), [])
        return reports

    def on_table(self, table: TableSnapshot) -> None:
        for replica, subscriber in list(self._subscribers.items()):
            if table.is_reaped(subscriber.router):
                del self._subscribers[replica]

    def changes(self) -> list[tuple[str, Message]]:
        """Return reports of the changes since the last call, for all subscribers."""
        reports = self._changes_in(Tier.DEVICE, self._journal)
        for tier, journal in self._tiers.journals.items() if self._tiers else ():
            reports += self._changes_in(tier, journal)
        return reports

    def _changes_in(self, tier: Tier, journal: PageJournal) -> list[tuple[str, Message]]:
        stored, removed = map(_chained, journal.take())
        if not stored and not removed:
            return []
        subscribers = self._subscribers.values()
        return [reports for subscriber in subscribers for reports in self._report(subscriber, tier, stored, removed)]

    def _report(
        self, subscriber: _Subscriber, tier: Tier, stored: list[bytes], removed: list[bytes]
    ) -> list[tuple[str, Message]]:
        nothing: list[bytes] = []
        parts = itertools.zip_longest(_parts(stored), _parts(removed), fillvalue=nothing)
        reports: list[tuple[str, Message]] = []
        # An empty cache must be reported too.
        for some_stored, some_removed in list(parts) or [(nothing, nothing)]:
            events = KvEvents(
                replica=self._me.replica,
                incarnation=self._me.incarnation,
                number=subscriber.next_number,
                stored=some_stored,
                removed=some_removed,
                tier=tier,
            )
            subscriber.next_number += 1
            reports.append((subscriber.router.address, events))
        return reports


def _chained(keys: list[bytes]) -> list[bytes]:
    """Return the keys of pages in the first lifetime, which identify prefixes for routers."""
    return [key for key in keys if not lifetime_of(key)]


def _parts(keys: list[bytes]) -> list[list[bytes]]:
    return [keys[start : start + MAX_KEYS] for start in range(0, len(keys), MAX_KEYS)]
