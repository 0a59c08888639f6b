"""Memory that the connections of an event loop hold for their clients."""

import asyncio
from collections import Counter
from collections.abc import Hashable


class Holdings:
    """Bytes that connections hold. If they hold too many together, the client that holds most loses a connection: the
    oldest one that holds at least as much as that client's connections do on average.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.total = 0
        """Number of bytes that all connections hold."""
        self._held: dict[Hashable, dict[asyncio.Transport, int]] = {}
        """Bytes of each connection by client; connections are in the order in which they began to hold something."""
        self._sizes = Counter[Hashable]()
        self._owners: dict[asyncio.Transport, Hashable] = {}

    def hold(self, wire: asyncio.Transport, client: Hashable, num_bytes: int) -> None:
        """Record the number of bytes that a connection of a client holds now."""
        if not num_bytes:
            self.forget(wire)
            return
        client = self._owners.setdefault(wire, client)
        own = self._held.setdefault(client, {})
        added = num_bytes - own.get(wire, 0)
        own[wire] = num_bytes
        self._sizes[client] += added
        self.total += added
        while self.total > self._max_bytes:
            chosen = self._oldest_large(max(self._sizes, key=self._sizes.__getitem__))
            self.forget(chosen)
            chosen.abort()

    def forget(self, wire: asyncio.Transport) -> None:
        """Release the bytes of a connection."""
        if wire not in self._owners:
            return
        client = self._owners.pop(wire)
        num_bytes = self._held[client].pop(wire)
        self._sizes[client] -= num_bytes
        self.total -= num_bytes
        if not self._held[client]:
            del self._held[client], self._sizes[client]

    def _oldest_large(self, client: Hashable) -> asyncio.Transport:
        """Return a client's oldest connection of average size or more. Smaller ones are the newest from now on."""
        own = self._held[client]
        while own[oldest := next(iter(own))] * len(own) < self._sizes[client]:
            own[oldest] = own.pop(oldest)
        return oldest
