"""An administrator's commands to replicas: repeated until they answer, for a bounded time."""

import asyncio
import itertools
from collections.abc import Callable, Sequence

from cluster.spec.ids import Incarnation, Peer, ReplicaId
from cluster.spec.messages import Command, CommandResult, Wanted
from router.errors import no_answer, refused

AGAIN_S = 2.0
"""Interval between repetitions; a replica carries a command out once."""
MAX_TIMES = 10


class Commands:
    """Belongs to one event loop; every method is called from it."""

    def __init__(self, me: Peer, send: Callable[[Peer, Command], None]) -> None:
        self._me = me
        self._send = send
        self._numbers = itertools.count(1)
        self._answers: dict[tuple[int, ReplicaId, Incarnation], asyncio.Future[CommandResult]] = {}
        """Awaited answers, by number of the command and start of the replica."""

    async def give(self, peers: Sequence[Peer], wanted: Wanted) -> list[CommandResult]:
        """Have replicas do something; return their answers when every one of them has done it.

        Raises:
            ApiError: some did not answer, or cannot do it.
        """
        number, loop = next(self._numbers), asyncio.get_running_loop()
        awaited = {peer: loop.create_future() for peer in peers}
        keys = {(number, peer.replica, peer.incarnation): answer for peer, answer in awaited.items()}
        self._answers |= keys
        missing = list(peers)
        try:
            for _ in range(MAX_TIMES if peers else 0):
                for peer in missing:
                    self._send(
                        peer, Command(number=number, sender=self._me, incarnation=peer.incarnation, wanted=wanted)
                    )
                await asyncio.wait(awaited.values(), timeout=AGAIN_S)
                missing = [peer for peer in missing if not awaited[peer].done()]
                if not missing:
                    break
        finally:
            for key in keys:
                del self._answers[key]
        if missing:
            raise no_answer(
                f"{', '.join(peer.replica for peer in missing)}: no answer to {type(wanted).__name__}, "
                f"sent {MAX_TIMES} times in {MAX_TIMES * AGAIN_S:g} s; it may still have been carried out"
            )
        return _all_done([answer.result() for answer in awaited.values()])

    def on_taken(self, taken: CommandResult) -> None:
        """Take a replica's answer; one that is not awaited is ignored."""
        answer = self._answers.get((taken.number, taken.replica, taken.incarnation))
        if answer is not None and not answer.done():
            answer.set_result(taken)


def _all_done(answers: list[CommandResult]) -> list[CommandResult]:
    refusals = [f"{answer.replica}: {answer.refusal}" for answer in answers if answer.refusal]
    if not refusals:
        return answers
    done = [answer.replica for answer in answers if not answer.refusal]
    raise refused("; ".join(refusals) + (f"; done by {', '.join(done)}" if done else ""))
