"""How much this router has open at each replica; what least_tokens looks at."""

from collections.abc import Callable, Mapping

from cluster.spec.ids import Incarnation, ReplicaId
from cluster.spec.peer import Peer
from router.policies.candidate import Load

Key = tuple[ReplicaId, Incarnation]
_NOTHING = Load()


class LoadBook:
    """Requests and tokens per start of a replica; a replica with nothing open has no line."""

    def __init__(self, elsewhere: Callable[[], Mapping[Key, Load]] = dict) -> None:
        """``elsewhere`` tells what other router processes have open."""
        self._elsewhere = elsewhere
        self._lines: dict[Key, Load] = {}

    def add(self, peer: Peer, num_tokens: int) -> None:
        """One request of so many tokens was opened."""
        self._change(peer, 1, num_tokens)

    def remove(self, peer: Peer, num_tokens: int) -> None:
        """One request of so many tokens ended."""
        self._change(peer, -1, -num_tokens)

    def of(self, peer: Peer) -> Load:
        """What is open at one peer, here and elsewhere."""
        own, other = self._lines.get(_key(peer), _NOTHING), self._elsewhere().get(_key(peer))
        return own if other is None else own.plus(other)

    def lines(self) -> dict[Key, Load]:
        """A copy of the book, which has what is open here."""
        return dict(self._lines)

    def _change(self, peer: Peer, num_requests: int, num_tokens: int) -> None:
        line = self._lines.pop(_key(peer), _NOTHING)
        new = Load(num_requests=line.num_requests + num_requests, num_tokens=line.num_tokens + num_tokens)
        assert new.num_requests >= 0, f"more requests ended than opened at {peer.replica}"
        assert new.num_tokens >= 0, f"more tokens ended than opened at {peer.replica}"
        if new != _NOTHING:
            self._lines[_key(peer)] = new


def _key(peer: Peer) -> Key:
    return peer.replica, peer.incarnation
