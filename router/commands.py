"""What replicas are told to do for an administrator: told again until they answer, for a bounded time."""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress

from cluster.spec.ids import Incarnation, ReplicaId
from cluster.spec.messages import Command, CommandTaken, Wanted
from cluster.spec.peer import Peer
from router.errors import NoAnswerError

AGAIN_S = 2.0
"""Between two times that a replica is told; it does once what it hears twice."""
MAX_TIMES = 10


class Commands:
    """Belongs to one event loop; every method is called from it."""

    def __init__(self, me: Peer, tell: Callable[[Peer, Command], None]) -> None:
        self._me = me
        self._tell = tell
        self._numbers = itertools.count(1)
        self._open: dict[int, _Open] = {}

    async def give(self, peers: Sequence[Peer], wanted: Wanted) -> None:
        """Let replicas do something; returns when every one of them has taken it.

        Raises:
            NoAnswerError: some did not answer.
        """
        number = next(self._numbers)
        given = self._open[number] = _Open(peers)
        try:
            for _ in range(MAX_TIMES):
                for peer in given.missing.values():
                    command = Command(number=number, sender=self._me, incarnation=peer.incarnation, wanted=wanted)
                    self._tell(peer, command)
                with suppress(TimeoutError):
                    await asyncio.wait_for(given.taken.wait(), AGAIN_S)
                if not given.missing:
                    return
        finally:
            del self._open[number]
        names = ", ".join(peer.replica for peer in given.missing.values())
        raise NoAnswerError(
            f"{names}: no answer to {type(wanted).__name__}, told {MAX_TIMES} times in {MAX_TIMES * AGAIN_S:g} s; "
            "it may be done all the same"
        )

    def on_taken(self, taken: CommandTaken) -> None:
        """A replica answers; one that was not asked is passed over."""
        if (given := self._open.get(taken.number)) is not None:
            given.missing.pop((taken.replica, taken.incarnation), None)
            if not given.missing:
                given.taken.set()


class _Open:
    """One command."""

    def __init__(self, peers: Sequence[Peer]) -> None:
        self.missing: dict[tuple[ReplicaId, Incarnation], Peer] = {
            (peer.replica, peer.incarnation): peer for peer in peers
        }
        """Those that have not answered."""
        self.taken = asyncio.Event()
        """All have."""
        if not peers:
            self.taken.set()
