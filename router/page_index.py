"""Which prefixes each replica has cached, as its leader tells. Sans I/O.

A hint for choosing replicas, no more: a replica that has lost a prefix computes it again.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cluster.spec.ids import Incarnation, ReplicaId
from cluster.spec.messages import PageNews
from cluster.spec.peer import Peer
from cluster.spec.tiers import Tier
from router.key_set import KeySet
from router.lower_tiers import LowerTiers, Weights

_ASK_AGAIN_S = 5.0
"""Silence after which a replica is asked once more."""


@dataclass(slots=True)
class _Known:
    asked_s: float
    next_number: int | None = None
    """Of the news; none before everything was told."""
    keys: KeySet = field(default_factory=KeySet)
    is_partial: bool = False
    """Some were left out for want of memory, so that a page may be here without those above it."""


class PageIndex:
    """The page keys of all replicas. A chained key stands for the whole prefix, so a set of them is a radix tree."""

    def __init__(self, max_pages: int) -> None:
        """Keeps at most so many keys over all replicas; what comes beyond is as if it were not cached."""
        self._max_pages = max_pages
        self._known: dict[tuple[ReplicaId, Incarnation], _Known] = {}
        self._below = LowerTiers(max_pages)
        self.num_pages = 0
        self.num_gaps = 0
        """Times that news were missing."""

    def update(self, peers: Iterable[Peer], now_s: float) -> list[Peer]:
        """These replicas are there; the ones to be asked what they have."""
        present = {(peer.replica, peer.incarnation): peer for peer in peers}
        for key in self._known.keys() - present.keys():
            self.num_pages -= len(self._known.pop(key).keys)
            self._below.forget(key)
        asked = []
        for key, peer in present.items():
            known = self._known.get(key)
            if known is None or (known.next_number is None and now_s >= known.asked_s + _ASK_AGAIN_S):
                self._known[key] = _Known(asked_s=now_s)
                asked.append(peer)
        return asked

    def on_news(self, news: PageNews, now_s: float) -> bool:
        """Take news in, in their order; True when some are missing, and the replica is to be asked again."""
        owner = news.replica, news.incarnation
        known = self._known.get(owner)
        if known is None:
            return False
        if news.number == 0:
            self.num_pages -= known.keys.clear()
            self._below.forget(owner)
            known.is_partial = False
        elif known.next_number is None or news.number < known.next_number:
            return False
        elif news.number > known.next_number:
            self.num_gaps += 1
            self.num_pages -= known.keys.clear()
            self._below.forget(owner)
            known.next_number, known.asked_s = None, now_s
            return True
        known.next_number = news.number + 1
        if news.tier is Tier.DEVICE:
            self.num_pages -= known.keys.remove_all(news.removed)
            self._store(known, news.stored)
        else:
            self._below.note(owner, news.tier, news.stored, news.removed)
        return False

    def is_known(self, key: bytes) -> bool:
        """Whether any replica, or storage, has a page."""
        return any(key in known.keys for known in self._known.values()) or self._below.is_known(key)

    def worth(self, peer: Peer, keys: Sequence[bytes], weights: Weights) -> float:
        """What the cached pages of a prompt are worth at a replica, in pages on its device."""
        num_here = self.count(peer, keys)
        return num_here + self._below.worth((peer.replica, peer.incarnation), keys[num_here:], weights)

    def count(self, peer: Peer, keys: Sequence[bytes]) -> int:
        """How many leading pages of a prompt a replica has."""
        known = self._known.get((peer.replica, peer.incarnation))
        if known is None:
            return 0
        if known.is_partial:
            return next((number for number, key in enumerate(keys) if key not in known.keys), len(keys))
        return bisect_left(keys, True, key=lambda key: key not in known.keys)

    def next_number(self, peer: Peer) -> int | None:
        """Number of the news that a replica is to tell next; None before it has told everything."""
        known = self._known.get((peer.replica, peer.incarnation))
        return known.next_number if known else None

    def keys_of(self, peer: Peer) -> frozenset[bytes]:
        """Everything that is known of one replica."""
        known = self._known.get((peer.replica, peer.incarnation))
        return frozenset(known.keys) if known else frozenset()

    def _store(self, known: _Known, keys: Sequence[bytes]) -> None:
        room = self._max_pages - self.num_pages
        known.is_partial = known.is_partial or len(keys) > room
        self.num_pages += known.keys.add_all(keys[:room])
