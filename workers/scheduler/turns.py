"""Whose turn it is in a step, and for how many tokens. Pure.

A step has a budget of tokens. A share of it belongs to the oldest sequence, however long and unimportant it is: so the
work that was there before a sequence bounds its end, and nothing that comes later does. The rest goes round by rank,
and nothing is left over while somebody wants it.
"""

from collections.abc import Callable

from cluster.spec.ids import Room

WINDOW = 32
"""Consecutive arrivals among which a longer prefix goes first; it overtakes fewer than so many of its like."""

Chunk = Callable[[int], int]
"""From the prefix length of a row to the tokens of such a row that fill a step: at least 1, at most the budget."""

Rank = tuple[int, int, int, int, int]
"""Sorts sequences by turn: no two have the same."""


def rank(*, priority: int, arrival: int, prefix_len: int, pending_len: int, chunk_tokens: int) -> Rank:
    """Lowest priority value first, then least work, then the longest prefix within a window, then the first to come.

    Work counts by the power of two of the steps it takes, so that those of like length keep their order, and a long
    prompt moves up as it is computed. ``prefix_len`` tokens have KV already, ``pending_len`` tokens have not.
    """
    num_steps = -(-pending_len // chunk_tokens)
    return priority, num_steps.bit_length(), arrival // WINDOW, -prefix_len, arrival


class Budget:
    """The tokens and rows of one step, given away turn by turn."""

    def __init__(self, num_tokens: int, num_rows: int, chunk: Chunk) -> None:
        """A row takes the part of the step that its tokens are of its ``chunk``."""
        self._num_tokens = self._left = num_tokens
        self._num_rows = num_rows
        self._chunk = chunk
        self.granted: dict[Room, int] = {}
        """Tokens of each row, in the order of the first grant."""

    def is_open(self, room: Room) -> bool:
        """Whether the room can still get tokens."""
        return self._left > 0 and (room in self.granted or len(self.granted) < self._num_rows)

    def grant(self, room: Room, prefix_len: int, wanted: int) -> None:
        """Bring the room's row to as many tokens as are wanted, as far as there are some left."""
        self._take(room, prefix_len, wanted, self._left)

    def grant_share(self, room: Room, prefix_len: int, wanted: int, share: float) -> None:
        """The same up to a share of the step; at least one token."""
        one_token = -(-self._num_tokens // self._chunk(prefix_len))
        self._take(room, prefix_len, wanted, min(self._left, max(one_token, int(share * self._num_tokens))))

    def _take(self, room: Room, prefix_len: int, wanted: int, offered: int) -> None:
        chunk = self._chunk(prefix_len)
        assert 0 < chunk <= self._num_tokens, f"a chunk of {chunk} tokens in a step of {self._num_tokens}"
        before = self.granted.get(room, 0)
        count = min(wanted - before, offered * chunk // self._num_tokens)
        if count and self.is_open(room):
            self._left -= -(-count * self._num_tokens // chunk)
            self.granted[room] = before + count
