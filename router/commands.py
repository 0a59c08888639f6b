"""An administrator's commands to replicas: repeated until they answer, for a bounded time."""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress

from cluster.spec.ids import Incarnation, ReplicaId
from cluster.spec.messages import Command, CommandTaken, Wanted
from cluster.spec.peer import Peer
from router.errors import NoAnswerError, RefusedError

AGAIN_S = 2.0
"""Interval between repetitions; a replica carries a command out once."""
MAX_TIMES = 10


class Commands:
    """Belongs to one event loop; every method is called from it."""

    def __init__(self, me: Peer, send: Callable[[Peer, Command], None]) -> None:
        self._me = me
        self._send = send
        self._numbers = itertools.count(1)
        self._open: dict[int, _Open] = {}

    async def give(self, peers: Sequence[Peer], wanted: Wanted) -> list[CommandTaken]:
        """Have replicas do something; return their answers when every one of them has done it.

        Raises:
            NoAnswerError: some did not answer.
            RefusedError: some cannot do it.
        """
        number = next(self._numbers)
        given = self._open[number] = _Open(peers)
        try:
            for _ in range(MAX_TIMES):
                for peer in given.missing.values():
                    command = Command(number=number, sender=self._me, incarnation=peer.incarnation, wanted=wanted)
                    self._send(peer, command)
                with suppress(TimeoutError):
                    await asyncio.wait_for(given.taken.wait(), AGAIN_S)
                if not given.missing:
                    return _all_done(given.answers)
        finally:
            del self._open[number]
        names = ", ".join(peer.replica for peer in given.missing.values())
        raise NoAnswerError(
            f"{names}: no answer to {type(wanted).__name__}, sent {MAX_TIMES} times in {MAX_TIMES * AGAIN_S:g} s; "
            "it may be done nevertheless"
        )

    def on_taken(self, taken: CommandTaken) -> None:
        """Take a replica's answer; one that was not asked is ignored."""
        if (given := self._open.get(taken.number)) is not None:
            if given.missing.pop((taken.replica, taken.incarnation), None) is not None:
                given.answers.append(taken)
            if not given.missing:
                given.taken.set()


def _all_done(answers: list[CommandTaken]) -> list[CommandTaken]:
    refusals = [f"{answer.replica}: {answer.refusal}" for answer in answers if answer.refusal]
    if not refusals:
        return answers
    done = [answer.replica for answer in answers if not answer.refusal]
    raise RefusedError("; ".join(refusals) + (f"; done by {', '.join(done)}" if done else ""))


class _Open:
    def __init__(self, peers: Sequence[Peer]) -> None:
        self.missing: dict[tuple[ReplicaId, Incarnation], Peer] = {
            (peer.replica, peer.incarnation): peer for peer in peers
        }
        """Replicas that have not responded."""
        self.answers: list[CommandTaken] = []
        self.taken = asyncio.Event()
        """Set when all have."""
        if not peers:
            self.taken.set()
