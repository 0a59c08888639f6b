"""Ranking of sequences in a step, and their shares of its tokens. Pure.

A step has a budget of tokens and of time. A share of the time belongs to the oldest sequences, one of each length,
however unimportant they are: so the work that was there before a sequence bounds its end, and nothing that comes later
does. The rest is granted by rank, and nothing is left over while a sequence wants it.
"""

from typing import NamedTuple

from cluster.spec.ids import Room
from workers.context_parallel.cost_model import ChunkLen

WINDOW = 32
"""Number of consecutive arrivals among which longer prefixes go first. A sequence overtakes fewer than this many others
of its length.
"""
_ROUNDING = 1e-6
"""Rounding error, in tokens, that a sum of shares may have."""

SortKey = tuple[int, int, int, int, int]
"""Sort key of sequences; no two have the same."""
_AGED = 2
"""Shortest length class that waiting can lower a sequence to. Sequences of a single step stay ahead, since they delay
others little.
"""


class Turn(NamedTuple):
    """Rank of a sequence among those that compete for a step's tokens."""

    length: int
    """Length class: log2 of the number of steps that it takes."""
    sort_key: SortKey


def turn(
    *, priority: int, arrival: int, prefix_len: int, pending_len: int, chunk_tokens: int, age_steps: int = 0
) -> Turn:
    """Rank a sequence by lowest priority value, then least work, then longest prefix within a window, then arrival.

    Work counts by the power of two of the steps it takes, so that sequences of similar length keep their order, and a
    long prompt moves up as it is computed. It also moves up as it waits, by one for each doubling of the steps since
    its arrival over those it needs. ``prefix_len`` tokens have KV already, ``pending_len`` tokens have not.
    """
    num_steps = max(1, -(-pending_len // chunk_tokens))
    length = num_steps.bit_length()
    aged = max(min(length, _AGED), length - (age_steps // num_steps).bit_length())
    return Turn(length, (priority, aged, arrival // WINDOW, -prefix_len, arrival))


class Budget:
    """Tokens, time and requests of one step, granted request by request."""

    def __init__(
        self, num_tokens: int, max_requests: int, chunk: ChunkLen, max_context_tokens: int | None = None
    ) -> None:
        """Build a budget. A request uses a share of the step's time: its tokens divided by its ``chunk``.
        ``max_context_tokens`` limits the tokens of several requests including their prefixes.

        ``max_context_tokens``: most tokens of all requests including their prefixes, where there are several.
        """
        self._num_left = num_tokens
        self._context_left = max_context_tokens
        self._time_left = 1.0
        self._max_requests = max_requests
        self._chunk = chunk
        self.granted: dict[Room, int] = {}
        """Tokens by scheduled request, in the order of their first grants."""

    def is_open(self, room: Room) -> bool:
        """Return whether the room can still get tokens."""
        has_place = room in self.granted or len(self.granted) < self._max_requests
        return has_place and self._num_left > 0 and self._time_left > 0

    def grant(self, room: Room, prefix_len: int, num_tokens: int) -> None:
        """Raise a room's tokens to ``num_tokens``, or as far as the budget allows."""
        chunk = self._chunk(prefix_len)
        count = min(num_tokens - self.granted.get(room, 0), int(self._time_left * chunk + _ROUNDING))
        self._add(room, prefix_len, count, chunk)

    def grant_share(self, room: Room, prefix_len: int, num_tokens: int, share: float) -> None:
        """Grant a room its initial share of the step, at least one token."""
        chunk = self._chunk(prefix_len)
        self._add(room, prefix_len, min(num_tokens, max(1, int(share * min(chunk, self._num_left)))), chunk)

    def grant_stream(self, room: Room, prefix_len: int) -> None:
        """Grant one token to a room that has none and may still enter the step."""
        chunk = self._chunk(prefix_len)
        if self._time_left * chunk + _ROUNDING >= 1:
            self._num_left -= 1
            self._time_left = max(0.0, self._time_left - 1 / chunk)
            self.granted[room] = 1

    def _add(self, room: Room, prefix_len: int, count: int, chunk: int) -> None:
        count = min(count, self._num_left)
        before = 0 if room in self.granted else prefix_len
        if self._context_left is not None and self.granted:
            count = min(count, self._context_left - before)
        if count > 0 and self.is_open(room):
            if self._context_left is not None:
                self._context_left -= before + count
            self._num_left -= count
            self._time_left = max(0.0, self._time_left - count / chunk)
            self.granted[room] = self.granted.get(room, 0) + count
