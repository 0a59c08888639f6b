"""Order of sequences in a step, and their shares of the step's tokens. No I/O.

A step has a budget of tokens and of time. Its time is what the most urgent sequence needs to be complete, but at least
what makes a step efficient, and at most a full step's. A share of the time is reserved for the oldest sequence of each
length class, regardless of priority, so that later arrivals cannot delay a sequence without limit. The rest is granted
by priority until the budget or the work is used up.
"""

from math import ceil
from typing import NamedTuple

from cluster.spec.ids import Room
from workers.context_parallel.chunk_sizes import ChunkLen

WINDOW = 32
"""Number of consecutive arrivals among which sequences with longer prefixes take precedence."""
_ROUNDING = 1e-6
"""Rounding error, in tokens, that a sum of shares may have."""

SortKey = tuple[int, int, int, int, int]
"""Sort key that no two sequences share."""
_AGED = 2
"""Lowest length class that a sequence can reach by waiting, so that sequences that need only one step stay ahead."""


class Precedence(NamedTuple):
    """Position of a sequence among those that compete for a step's tokens."""

    num_steps: float
    """Work left, in efficient steps."""
    length: int
    """Length class: log2 of the number of steps."""
    sort_key: SortKey


def precedence(
    *, priority: int, arrival_number: int, prefix_len: int, pending_len: int, chunk_tokens: float, age_steps: int = 0
) -> Precedence:
    """Return a sequence's precedence: by priority, then least work, then longest prefix within a window, then arrival.

    Work counts as the logarithm of the number of steps, so that sequences of similar length keep their order. A long
    prompt moves up as it is computed and as it waits: by one class for each doubling of its age relative to its number
    of steps.

    Args:
        prefix_len: number of tokens that have KV.
        pending_len: number of tokens without KV.
        chunk_tokens: number of tokens after the prefix that make a step efficient.
    """
    num_steps = max(1, ceil(pending_len / chunk_tokens))
    length = num_steps.bit_length()
    aged = max(min(length, _AGED), length - (age_steps // num_steps).bit_length())
    sort_key = priority, aged, arrival_number // WINDOW, -prefix_len, arrival_number
    return Precedence(pending_len / chunk_tokens, length, sort_key)


class Budget:
    """Tokens, time and requests still available in one step."""

    def __init__(
        self, num_tokens: int, max_requests: int, chunk: ChunkLen, max_context_tokens: int | None = None
    ) -> None:
        """Create the budget of a full step. ``max_context_tokens`` limits a step with several requests and counts their
        prefixes.
        """
        self._num_tokens = self._num_left = num_tokens
        self._context_left = max_context_tokens
        self._time = self._time_left = 1.0
        self._max_requests = max_requests
        self._chunk = chunk
        self.granted: dict[Room, int] = {}
        """Number of tokens by scheduled request, in the order of the requests' first grants."""

    def shorten(self, share: float) -> None:
        """Shorten the rest of the step to a share of a full one. Only streams may have been granted before."""
        self._num_left = min(self._num_left, ceil(self._num_tokens * share))
        self._time = self._time_left = min(self._time_left, share)

    def is_open(self, room: Room) -> bool:
        """Return whether the step can grant the room more tokens."""
        has_slot = room in self.granted or len(self.granted) < self._max_requests
        return has_slot and self._num_left > 0 and self._time_left > 0

    def grant(self, room: Room, prefix_len: int, num_tokens: int) -> int:
        """Raise a room's number of tokens to ``num_tokens``, or as far as the budget allows. Return the increase."""
        chunk = self._chunk(prefix_len)
        count = min(num_tokens - self.granted.get(room, 0), int(self._time_left * chunk + _ROUNDING))
        return self._add(room, prefix_len, count, chunk)

    def grant_share(self, room: Room, prefix_len: int, num_tokens: int, share: float) -> int:
        """Grant a room its initial share of the step, at least one token. Return the number of tokens."""
        chunk = self._chunk(prefix_len)
        most = int(share * min(chunk * self._time, self._num_left))
        return self._add(room, prefix_len, min(num_tokens, max(1, most)), chunk)

    def grant_stream(self, room: Room, prefix_len: int) -> int:
        """Grant one token to a room if time is left. Return the number of tokens. Requires ``is_open``."""
        chunk = self._chunk(prefix_len)
        if self._time_left * chunk + _ROUNDING < 1:
            return 0
        self._num_left -= 1
        self._time_left = max(0.0, self._time_left - 1 / chunk)
        self.granted[room] = 1
        return 1

    def _add(self, room: Room, prefix_len: int, count: int, chunk: int) -> int:
        count = min(count, self._num_left)
        before = 0 if room in self.granted else prefix_len
        if self._context_left is not None and self.granted:
            count = min(count, self._context_left - before)
        if count <= 0 or not self.is_open(room):
            return 0
        if self._context_left is not None:
            self._context_left -= before + count
        self._num_left -= count
        self._time_left = max(0.0, self._time_left - count / chunk)
        self.granted[room] = self.granted.get(room, 0) + count
        return count
