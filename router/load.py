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
        key, elsewhere = (peer.replica, peer.incarnation), self._elsewhere()
        own = self._lines.get(key, _NOTHING)
        return own.plus(elsewhere[key]) if key in elsewhere else own

    def lines(self) -> dict[Key, Load]:
        """A copy of the book, which has what is open here."""
        return dict(self._lines)

    def _change(self, peer: Peer, num_requests: int, num_tokens: int) -> None:
        key = peer.replica, peer.incarnation
        line = self._lines.get(key, _NOTHING)
        num_requests += line.num_requests
        num_tokens += line.num_tokens
        assert num_requests >= 0, f"more requests ended than opened at {peer.replica}"
        assert num_tokens >= 0, f"more tokens ended than opened at {peer.replica}"
        if num_requests or num_tokens:
            self._lines[key] = Load(num_requests=num_requests, num_tokens=num_tokens)
        else:
            del self._lines[key]
