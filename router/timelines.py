"""Timelines of timed requests: asked of every rank when the request has ended, and kept until somebody reads them."""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.spec.ids import Room
from cluster.spec.messages import Timeline
from cluster.spec.registry import RankRow
from cluster.spec.step_messages import GiveTimeline
from cluster.spec.timeline import Interval

MAX_KEPT = 8
"""Timed requests known at once; the oldest makes room."""


@dataclass(slots=True)
class Gathering:
    """What is known of one timed request."""

    attempt: Room
    """Room of its last attempt, which is the one that is shown."""
    ranks: Sequence[RankRow]
    """Of both replicas."""
    timelines: list[Timeline] = field(default_factory=list)
    router: list[Interval] | None = None
    """The router's own part; None until the request has ended."""
    whole: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def missing(self) -> list[str]:
        """The ranks that have not answered."""
        told = {(timeline.replica, timeline.global_rank) for timeline in self.timelines}
        return [
            rank_name(rank.replica, rank.global_rank)
            for rank in self.ranks
            if (rank.replica, rank.global_rank) not in told
        ]


class Timelines:
    """Belongs to one event loop; every method is called from it."""

    def __init__(self, reply_to: str) -> None:
        self._reply_to = reply_to
        self._gatherings: OrderedDict[Room, Gathering] = OrderedDict()
        """By the request's name."""

    def begin(self, room: Room, attempt: Room, ranks: Sequence[RankRow]) -> None:
        """An attempt of a timed request starts on these ranks."""
        self._gatherings[room] = Gathering(attempt, ranks)
        if len(self._gatherings) > MAX_KEPT:
            self._gatherings.popitem(last=False)

    def has(self, room: Room) -> bool:
        """Whether this is the name of a timed request that is still known."""
        return room in self._gatherings

    def end(self, room: Room, router: list[Interval]) -> list[tuple[str, GiveTimeline]]:
        """A timed request is over, with what the router saw of it; what to ask of whom."""
        gathering = self._gatherings[room]
        gathering.router = router
        ask = GiveTimeline(room=gathering.attempt, reply_to=self._reply_to)
        return [(rank.address, ask) for rank in gathering.ranks]

    def on_timeline(self, timeline: Timeline) -> None:
        """A rank answers; one that was not asked is passed over."""
        found = (gathering for gathering in self._gatherings.values() if gathering.attempt == timeline.room)
        gathering = next(found, None)
        if gathering is None or rank_name(timeline.replica, timeline.global_rank) not in gathering.missing:
            return
        gathering.timelines.append(timeline)
        if not gathering.missing:
            gathering.whole.set()

    async def gather(self, name: str, timeout_s: float) -> Gathering | None:
        """What is known of a timed request once every rank has answered, or after so long; None of another one.

        Args:
            name: in decimal.
        """
        gathering = next((found for room, found in self._gatherings.items() if str(room) == name), None)
        if gathering is not None and gathering.ranks:
            await asyncio.wait([waiting := asyncio.ensure_future(gathering.whole.wait())], timeout=timeout_s)
            waiting.cancel()
        return gathering


def rank_name(replica: str, global_rank: int) -> str:
    """What people call a rank."""
    return f"{replica} rank {global_rank}"
