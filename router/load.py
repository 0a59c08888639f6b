"""How much this router has open at each replica; what least_tokens looks at."""

from cluster.spec.ids import Incarnation, ReplicaId
from cluster.spec.peer import Peer
from router.policies.candidate import Load

_NOTHING = Load()


class LoadBook:
    """Requests and tokens per start of a replica; a replica with nothing open has no line."""

    def __init__(self) -> None:
        self._lines: dict[tuple[ReplicaId, Incarnation], Load] = {}

    def add(self, peer: Peer, num_tokens: int) -> None:
        """One request of so many tokens was opened."""
        self._change(peer, 1, num_tokens)

    def remove(self, peer: Peer, num_tokens: int) -> None:
        """One request of so many tokens ended."""
        self._change(peer, -1, -num_tokens)

    def of(self, peer: Peer) -> Load:
        """What is open at one peer."""
        return self._lines.get(_key(peer), _NOTHING)

    def lines(self) -> dict[tuple[ReplicaId, Incarnation], Load]:
        """A copy of the whole book."""
        return dict(self._lines)

    def _change(self, peer: Peer, num_requests: int, num_tokens: int) -> None:
        line = self._lines.pop(_key(peer), _NOTHING)
        new = Load(num_requests=line.num_requests + num_requests, num_tokens=line.num_tokens + num_tokens)
        assert new.num_requests >= 0, f"more requests ended than opened at {peer.replica}"
        assert new.num_tokens >= 0, f"more tokens ended than opened at {peer.replica}"
        if new != _NOTHING:
            self._lines[_key(peer)] = new


def _key(peer: Peer) -> tuple[ReplicaId, Incarnation]:
    return peer.replica, peer.incarnation
