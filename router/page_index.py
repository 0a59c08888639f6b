"""Keys of a prompt's pages, and the index of the keys that each replica has cached. Sans I/O."""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.spec.ids import Incarnation, Peer, ReplicaId
from cluster.spec.kv import extend_page_keys
from cluster.spec.messages import KvEvents
from cluster.spec.tiers import Tier

_ASK_AGAIN_S = 5.0
"""Time without a reply after which the router subscribes to a replica again."""
LONG_TOKENS = 32_768
"""Prompt length above which all keys are computed ahead, in another process."""
_SHARES = (6, 7, 8, 9, 10) * 6 + (6, 10)
"""Number of values of a key's first byte that each part of a KeySet covers, 256 in total.

Because the parts are unequal, they do not all grow at once.
"""

Owner = tuple[ReplicaId, Incarnation]


class PromptKeys:
    """Keys of a prompt's cacheable pages. They are computed only as far as some replica has cached them."""

    def __init__(self, prompt_ids: Sequence[int], page_size: int, salt: str, keys: Sequence[bytes] = ()) -> None:
        """Start with the keys that are already known."""
        self._prompt_ids = prompt_ids
        self._page_size = page_size
        self._salt = salt
        # The last token is always computed, never cached.
        self._num_pages = (len(prompt_ids) - 1) // page_size
        self._keys = [*keys]

    def all(self) -> list[bytes]:
        self._extend(self._num_pages)
        return self._keys

    def known(self, is_known: Callable[[bytes], bool]) -> Sequence[bytes]:
        """Return all keys before the first unknown one, and possibly some more."""
        while len(self._keys) < self._num_pages and (not self._keys or is_known(self._keys[-1])):
            self._extend(max(2 * len(self._keys), 1))
        return self._keys

    def _extend(self, num_pages: int) -> None:
        end = min(num_pages, self._num_pages) * self._page_size
        extend_page_keys(self._keys, self._prompt_ids[:end], self._page_size, self._salt)


class KeySet(Set[bytes]):
    """Set of page keys that never pauses to grow: many small dicts, selected by a key's first byte.

    Resizing a set of a million keys takes 150 ms, during which every stream waits. The garbage collector takes 50 ms to
    traverse such a set, but does not traverse a dict of bytes.
    """

    __slots__ = ("_num_keys", "_part_of", "_parts")

    def __init__(self) -> None:
        self._num_keys = 0
        self._parts: list[dict[bytes, None]] = [{} for _ in _SHARES]
        self._part_of = [part for part, share in zip(self._parts, _SHARES, strict=True) for _ in range(share)]

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and key in self._part_of[key[0]]

    def __iter__(self) -> Iterator[bytes]:
        for part in self._parts:
            yield from part

    def __len__(self) -> int:
        return self._num_keys

    def add_all(self, keys: Iterable[bytes]) -> None:
        part_of = self._part_of
        for key in keys:
            part_of[key[0]][key] = None
        self._num_keys = sum(map(len, self._parts))

    def remove_all(self, keys: Iterable[bytes]) -> None:
        part_of = self._part_of
        for key in keys:
            part_of[key[0]].pop(key, None)
        self._num_keys = sum(map(len, self._parts))


class CachedPages(NamedTuple):
    """Number of a prompt's leading pages that a replica can read: first on its device, then in each lower tier."""

    device: int = 0
    host: int = 0
    storage: int = 0

    @property
    def in_memory(self) -> int:
        return self.device + self.host


class LowerTiers:
    """Page keys below the device caches: in each replica's host memory, and in storage, which reports no evictions."""

    def __init__(self, max_keys: int) -> None:
        """Store at most ``max_keys`` keys of pages in host memory, and at most ``max_keys`` of pages in storage."""
        self._max_keys = max_keys
        self._host: dict[Owner, KeySet] = {}
        self._stored: OrderedDict[bytes, None] = OrderedDict()
        """Keys in storage, beginning with the one that was reported or looked up least recently."""

    def update(self, events: KvEvents) -> None:
        """Apply a replica's report about one tier."""
        if events.tier is Tier.STORAGE:
            self._update_stored(events.stored, events.removed)
            return
        keys = self._host.setdefault((events.replica, events.incarnation), KeySet())
        keys.remove_all(events.removed)
        keys.add_all(events.stored[: self._max_keys - sum(map(len, self._host.values()))])

    def forget(self, owner: Owner) -> None:
        self._host.pop(owner, None)

    def is_known(self, key: bytes) -> bool:
        return key in self._stored or any(key in keys for keys in self._host.values())

    def host_end(self, owner: Owner, keys: Sequence[bytes], begin: int) -> int:
        """Return the index of the first of these keys, from ``begin`` on, that is not in the replica's host memory."""
        host = self._host.get(owner)
        if host is None:
            return begin
        return next((index for index in range(begin, len(keys)) if keys[index] not in host), len(keys))

    def stored_ends(self, keys: Sequence[bytes]) -> Sequence[int]:
        """Return, for each key and for their end, the index of the first one from there on that is not in storage.

        Stored keys are marked as used.
        """
        end = len(keys)
        if not self._stored:
            return range(end + 1)
        ends = [end]
        # The first pages of a prefix are evicted last because the others are useless without them.
        for index in reversed(range(len(keys))):
            if keys[index] in self._stored:
                self._stored.move_to_end(keys[index])
            else:
                end = index
            ends.append(end)
        return ends[::-1]

    def _update_stored(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        for key in removed:
            self._stored.pop(key, None)
        for key in reversed(stored):
            self._stored[key] = None
            self._stored.move_to_end(key)
        while len(self._stored) > self._max_keys:
            self._stored.popitem(last=False)


@dataclass(slots=True)
class DevicePages:
    """Pages that one replica has reported as cached on its device."""

    peer: Peer
    subscribed_s: float
    next_number: int | None = None
    """Number of the next report; None before the first one, which lists all pages."""
    keys: KeySet = field(default_factory=KeySet)
    is_partial: bool = False
    """True if some keys did not fit, so that a page's key may be present without those of its predecessors."""


class PageIndex:
    """Page keys of all replicas. Each key identifies an entire prefix, so a set of keys works as a radix tree."""

    def __init__(self, max_pages: int) -> None:
        """Store at most ``max_pages`` keys for all replicas. Further pages count as not cached."""
        self._max_pages = max_pages
        self._known: dict[Owner, DevicePages] = {}
        self._below = LowerTiers(max_pages)
        self.num_gaps = 0

    @property
    def num_pages(self) -> int:
        """Number of keys on all replicas' devices."""
        return sum(len(known.keys) for known in self._known.values())

    def update(self, peers: Iterable[Peer], now_s: float) -> list[Peer]:
        """Set the current replicas; return those to subscribe to."""
        present = {(peer.replica, peer.incarnation): peer for peer in peers}
        for key in self._known.keys() - present.keys():
            del self._known[key]
            self._below.forget(key)
        subscribed = []
        for key, peer in present.items():
            known = self._known.get(key)
            if known is None or (known.next_number is None and now_s >= known.subscribed_s + _ASK_AGAIN_S):
                self._known[key] = DevicePages(peer, now_s)
                subscribed.append(peer)
        return subscribed

    def on_kv_events(self, events: KvEvents, now_s: float) -> Peer | None:
        """Apply a replica's report. If an earlier report is missing, return the replica, to subscribe to it again."""
        owner = events.replica, events.incarnation
        known = self._known.get(owner)
        if known is None:
            return None
        if events.number == 0:
            self._clear(owner, known)
        elif known.next_number is None or events.number < known.next_number:
            return None
        elif events.number > known.next_number:
            self.num_gaps += 1
            self._clear(owner, known)
            known.next_number, known.subscribed_s = None, now_s
            return known.peer
        known.next_number = events.number + 1
        if events.tier is Tier.DEVICE:
            known.keys.remove_all(events.removed)
            self._store(known, events.stored)
        else:
            self._below.update(events)
        return None

    def is_known(self, key: bytes) -> bool:
        return any(key in known.keys for known in self._known.values()) or self._below.is_known(key)

    def cached(self, peers: Iterable[Peer], keys: Sequence[bytes]) -> list[CachedPages]:
        """Return for each replica how many leading pages of a prompt it has in which tier."""
        if not keys:
            return [CachedPages() for _ in peers]
        # Replicas share the storage, so a long prompt is looked up there once, not once per replica.
        stored_ends = self._below.stored_ends(keys)
        cached = []
        for peer in peers:
            device_end = self.count(peer, keys)
            host_end = self._below.host_end((peer.replica, peer.incarnation), keys, device_end)
            cached.append(CachedPages(device_end, host_end - device_end, stored_ends[host_end] - host_end))
        return cached

    def count(self, peer: Peer, keys: Sequence[bytes]) -> int:
        """Return the number of leading pages of a prompt that a replica has on its device."""
        known = self.find(peer)
        if known is None:
            return 0
        if known.is_partial:
            return next((number for number, key in enumerate(keys) if key not in known.keys), len(keys))
        return bisect_left(keys, True, key=lambda key: key not in known.keys)

    def find(self, peer: Peer) -> DevicePages | None:
        return self._known.get((peer.replica, peer.incarnation))

    def _clear(self, owner: Owner, known: DevicePages) -> None:
        known.keys = KeySet()
        self._below.forget(owner)
        known.is_partial = False

    def _store(self, known: DevicePages, keys: Sequence[bytes]) -> None:
        free = self._max_pages - self.num_pages
        known.is_partial = known.is_partial or len(keys) > free
        known.keys.add_all(keys[:free])
