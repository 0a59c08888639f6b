"""What a lost message would leave waiting for ever: asked of others, and answered to them. Sans I/O.

An attempt of which nothing was heard for a while is asked about at its decode leader, again and again: its Submit, its
last Output or its Failure may be lost. Silence alone says nothing, since prompts take long; only an answer does.
"""

import math
from collections import defaultdict

from cluster.spec.ids import Room
from cluster.spec.messages import INQUIRE_EVERY_S, Cancel, Inquire
from cluster.spec.peer import Peer
from router.actions import Action, Send, Wait
from router.attempts import Attempts


class Inquiries:
    """Of one router."""

    def __init__(self, me: Peer, attempts: Attempts) -> None:
        self._me = me
        self._attempts = attempts
        self._due_s = 0.0

    @property
    def due_s(self) -> float:
        """When ``ask`` may next have something to ask: never while no attempt is under way."""
        return self._due_s if len(self._attempts) else math.inf

    def begin(self, now_s: float) -> list[Action]:
        """An attempt has begun."""
        if len(self._attempts) > 1:
            return []  # a time is set
        self._due_s = now_s + INQUIRE_EVERY_S
        return [Wait(until_s=self._due_s)]

    def ask(self, now_s: float) -> list[Action]:
        """Ask about all that have been silent, if it is time to."""
        if now_s < self._due_s:
            return []
        self._due_s = now_s + INQUIRE_EVERY_S
        silent: dict[Peer, list[Room]] = defaultdict(list)
        for attempt in self._attempts.silent_since(now_s - INQUIRE_EVERY_S):
            silent[attempt.pair.decode].append(attempt.room)
        return [
            Send(address=leg.address, message=Inquire(rooms=rooms, sender=self._me, incarnation=leg.incarnation))
            for leg, rooms in silent.items()
        ]

    def answer(self, inquire: Inquire) -> list[Action]:
        """A leader works for these; it is told again which of them are over."""
        leg = inquire.sender
        return [
            Send(address=leg.address, message=Cancel(room=room, incarnation=leg.incarnation))
            for room in inquire.rooms
            if room not in self._attempts
        ]
