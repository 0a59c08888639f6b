"""Page keys of a prompt, and the index of keys that each replica has cached, as its leader reports. Sans I/O."""

import asyncio
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field

from cluster.spec.ids import Incarnation, Peer, ReplicaId
from cluster.spec.kv import extend_page_keys
from cluster.spec.messages import KvEvents
from cluster.spec.tiers import Tier

_ASK_AGAIN_S = 5.0
"""Silence after which a replica is asked once more."""
_INLINE_TOKENS = 32_768
"""The keys of longer prompts are all made at once, in a thread."""
_FIRST_PAGES = 4
_SHARES = (6, 7, 8, 9, 10) * 6 + (6, 10)
"""First bytes of each part of a KeySet, 256 in all. They differ so that the parts do not all grow at once."""

Owner = tuple[ReplicaId, Incarnation]


class PromptKeys:
    """Keys of the pages of one prompt that may come from a cache, computed only as far as some replica has them."""

    def __init__(self, prompt_ids: Sequence[int], page_size: int, salt: str) -> None:
        self._prompt_ids = prompt_ids
        self._page_size = page_size
        self._salt = salt
        # The last token is always computed.
        self._num_pages = (len(prompt_ids) - 1) // page_size
        self._keys: list[bytes] = []

    async def prepare(self) -> None:
        """Compute the keys of a long prompt in a thread."""
        if len(self._prompt_ids) > _INLINE_TOKENS:
            await asyncio.to_thread(self._extend, self._num_pages)

    def known(self, is_known: Callable[[bytes], bool]) -> Sequence[bytes]:
        """Return all keys before the first unknown one, and perhaps some more."""
        while len(self._keys) < self._num_pages and (not self._keys or is_known(self._keys[-1])):
            self._extend(max(2 * len(self._keys), _FIRST_PAGES))
        return self._keys

    def _extend(self, num_pages: int) -> None:
        end = min(num_pages, self._num_pages) * self._page_size
        extend_page_keys(self._keys, self._prompt_ids[:end], self._page_size, self._salt)


class KeySet(Set[bytes]):
    """A set of page keys that grows without a pause: many small dicts, by the first byte of each key.

    A growing set is copied as a whole from time to time, which takes 150 ms with a million keys while every stream
    waits. The garbage collector walks a set, in 50 ms, but not a dict of bytes.
    """

    __slots__ = ("_part_of", "_parts")

    def __init__(self) -> None:
        self._parts: list[dict[bytes, None]] = [{} for _ in _SHARES]
        self._part_of = [part for part, share in zip(self._parts, _SHARES, strict=True) for _ in range(share)]

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and key in self._part_of[key[0]]

    def __iter__(self) -> Iterator[bytes]:
        for part in self._parts:
            yield from part

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def add_all(self, keys: Iterable[bytes]) -> None:
        part_of = self._part_of
        for key in keys:
            part_of[key[0]][key] = None

    def remove_all(self, keys: Iterable[bytes]) -> None:
        part_of = self._part_of
        for key in keys:
            part_of[key[0]].pop(key, None)


@dataclass(frozen=True, slots=True)
class Weights:
    """Value of a page in a lower tier, relative to 1 for one on the device."""

    host: float = 0.0
    storage: float = 0.0


class LowerTiers:
    """Page keys below the device caches: in each replica's host memory, and in storage, which reports no evictions."""

    def __init__(self, max_keys: int) -> None:
        """Keep at most ``max_keys`` keys of host pages, and as many of stored ones."""
        self._max_keys = max_keys
        self._host: dict[Owner, KeySet] = {}
        self._stored: OrderedDict[bytes, None] = OrderedDict()
        """Least recently reported or looked up first, which is the order of eviction."""

    def note(self, owner: Owner, tier: Tier, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Take a replica's report of what a tier gained and lost."""
        if tier is Tier.STORAGE:
            self._note_stored(stored, removed)
            return
        keys = self._host.setdefault(owner, KeySet())
        keys.remove_all(removed)
        keys.add_all(stored[: self._max_keys - sum(map(len, self._host.values()))])

    def forget(self, owner: Owner) -> None:
        """Drop what a replica has reported: it is gone, or reports everything anew."""
        self._host.pop(owner, None)

    def is_known(self, key: bytes) -> bool:
        return key in self._stored or any(key in keys for keys in self._host.values())

    def worth(self, owner: Owner, keys: Sequence[bytes], weights: Weights) -> float:
        """Return the worth, in pages, of the keys after those on the device, up to the first that is nowhere."""
        if not self._host and not self._stored:
            return 0.0
        host = self._host.get(owner, frozenset[bytes]())
        worth, found = 0.0, list[bytes]()
        for key in keys:
            if key in host:
                worth += weights.host
            elif key in self._stored:
                found.append(key)
                worth += weights.storage
            else:
                break
        # The first pages of a prefix are forgotten last: without them the others are worth nothing.
        for key in reversed(found):
            self._stored.move_to_end(key)
        return worth

    def _note_stored(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        for key in removed:
            self._stored.pop(key, None)
        for key in reversed(stored):
            self._stored[key] = None
            self._stored.move_to_end(key)
        while len(self._stored) > self._max_keys:
            self._stored.popitem(last=False)


@dataclass(slots=True)
class DevicePages:
    """Pages that one replica has reported on its device."""

    asked_s: float
    next_number: int | None = None
    """Number of the next report; None before everything was reported."""
    keys: KeySet = field(default_factory=KeySet)
    is_partial: bool = False
    """Some keys were left out for want of memory, so that a page may be here without those before it."""


class PageIndex:
    """The page keys of all replicas. A chained key stands for the whole prefix, so a set of them is a radix tree."""

    def __init__(self, max_pages: int) -> None:
        """Keep at most ``max_pages`` keys over all replicas; further ones count as not cached."""
        self._max_pages = max_pages
        self._known: dict[Owner, DevicePages] = {}
        self._below = LowerTiers(max_pages)
        self.num_gaps = 0

    @property
    def num_pages(self) -> int:
        """Keys of all replicas' devices."""
        return sum(len(known.keys) for known in self._known.values())

    def update(self, peers: Iterable[Peer], now_s: float) -> list[Peer]:
        """Take the replicas there are; return those to be asked what they have."""
        present = {(peer.replica, peer.incarnation): peer for peer in peers}
        for key in self._known.keys() - present.keys():
            del self._known[key]
            self._below.forget(key)
        asked = []
        for key, peer in present.items():
            known = self._known.get(key)
            if known is None or (known.next_number is None and now_s >= known.asked_s + _ASK_AGAIN_S):
                self._known[key] = DevicePages(asked_s=now_s)
                asked.append(peer)
        return asked

    def on_kv_events(self, events: KvEvents, now_s: float) -> bool:
        """Take a report, in order; return whether some are missing, so that the replica is to be asked again."""
        owner = events.replica, events.incarnation
        known = self._known.get(owner)
        if known is None:
            return False
        if events.number == 0:
            self._clear(owner, known)
        elif known.next_number is None or events.number < known.next_number:
            return False
        elif events.number > known.next_number:
            self.num_gaps += 1
            self._clear(owner, known)
            known.next_number, known.asked_s = None, now_s
            return True
        known.next_number = events.number + 1
        if events.tier is Tier.DEVICE:
            known.keys.remove_all(events.removed)
            self._store(known, events.stored)
        else:
            self._below.note(owner, events.tier, events.stored, events.removed)
        return False

    def is_known(self, key: bytes) -> bool:
        return any(key in known.keys for known in self._known.values()) or self._below.is_known(key)

    def worth(self, peer: Peer, keys: Sequence[bytes], weights: Weights) -> float:
        """Return what the cached pages of a prompt are worth at a replica, in pages on its device."""
        num_here = self.count(peer, keys)
        return num_here + self._below.worth((peer.replica, peer.incarnation), keys[num_here:], weights)

    def count(self, peer: Peer, keys: Sequence[bytes]) -> int:
        """Return how many leading pages of a prompt a replica has on its device."""
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
