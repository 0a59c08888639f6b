"""Which pages are below the device caches: in each replica's host memory, and in storage. Sans I/O."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.spec.ids import Incarnation, ReplicaId
from cluster.spec.tiers import Tier
from router.key_set import KeySet

Owner = tuple[ReplicaId, Incarnation]


@dataclass(frozen=True, slots=True)
class Weights:
    """What a page is worth there, where one on the device is worth 1."""

    host: float = 0.0
    storage: float = 0.0


class LowerTiers:
    """Hints, as the index of device pages is one; storage does not tell what it has given up."""

    def __init__(self, max_keys: int) -> None:
        """Keeps at most so many keys of host pages, and as many of stored ones."""
        self._max_keys = max_keys
        self._host: dict[Owner, KeySet] = {}
        self._num_host = 0
        self._stored: OrderedDict[bytes, None] = OrderedDict()
        """What was told of or asked for longest ago first, as storage gives it up."""

    def note(self, owner: Owner, tier: Tier, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """A replica tells what has come to a tier and gone from it."""
        if tier is Tier.STORAGE:
            self._note_stored(stored, removed)
            return
        if owner not in self._host:
            self._host[owner] = KeySet()
        keys = self._host[owner]
        self._num_host -= keys.remove_all(removed)
        self._num_host += keys.add_all(stored[: self._max_keys - self._num_host])

    def forget(self, owner: Owner) -> None:
        """A replica is gone, or tells everything anew."""
        self._num_host -= len(self._host.pop(owner, ()))

    def is_known(self, key: bytes) -> bool:
        """Whether a page is anywhere here."""
        return key in self._stored or any(key in keys for keys in self._host.values())

    def worth(self, owner: Owner, keys: Sequence[bytes], weights: Weights) -> float:
        """Of the pages that follow those on the device, up to the first that is nowhere; in pages."""
        if not self._num_host and not self._stored:
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
        # The first of a prefix are forgotten last: without them the others are worth nothing.
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
