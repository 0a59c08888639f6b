"""Admin commands to replicas, repeated until the replicas answer or a time limit is reached."""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from http import HTTPStatus

from cluster.spec.ids import Incarnation, Peer, ReplicaId
from cluster.spec.messages import Command, CommandResult, Wanted
from router.errors import ApiError, refused

AGAIN_S = 2.0
"""Interval between repetitions. A replica carries out a command only once."""
MAX_TIMES = 10


class Commands:
    """Commands sent to replicas that have not answered yet. Not thread-safe."""

    def __init__(self, me: Peer, send: Callable[[Peer, Command], None]) -> None:
        self._me = me
        self._send = send
        self._numbers = itertools.count(1)
        self._results: dict[tuple[int, ReplicaId, Incarnation], asyncio.Future[CommandResult]] = {}

    async def give(self, peers: Sequence[Peer], wanted: Wanted) -> list[CommandResult]:
        """Send a command to replicas; return their results when all have carried it out.

        Raises:
            ApiError: a replica did not answer, or refused the command.
        """
        number, loop = next(self._numbers), asyncio.get_running_loop()
        waiting = {(number, peer.replica, peer.incarnation): loop.create_future() for peer in peers}
        self._results |= waiting
        missing, num_sent = list(peers), 0
        try:
            while missing and num_sent < MAX_TIMES:
                for peer in missing:
                    command = Command(number=number, sender=self._me, incarnation=peer.incarnation, wanted=wanted)
                    self._send(peer, command)
                num_sent += 1
                await asyncio.wait(waiting.values(), timeout=AGAIN_S)
                missing = [peer for peer, result in zip(peers, waiting.values(), strict=True) if not result.done()]
        finally:
            for key in waiting:
                del self._results[key]
        if missing:
            message = (
                f"{', '.join(peer.replica for peer in missing)}: no answer to {type(wanted).__name__}, "
                f"sent {MAX_TIMES} times in {MAX_TIMES * AGAIN_S:g} s; it may still have been carried out"
            )
            raise ApiError(HTTPStatus.GATEWAY_TIMEOUT, message, code="no_answer")
        results = [result.result() for result in waiting.values()]
        if refusals := [f"{result.replica}: {result.refusal}" for result in results if result.refusal]:
            done = [result.replica for result in results if not result.refusal]
            raise refused("; ".join(refusals) + (f"; done by {', '.join(done)}" if done else ""))
        return results

    def on_result(self, result: CommandResult) -> None:
        waiting = self._results.get((result.number, result.replica, result.incarnation))
        if waiting is not None and not waiting.done():
            waiting.set_result(result)
