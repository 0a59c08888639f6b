"""Timelines of timed requests: asked of every rank when the request has ended, and kept until somebody reads them.

A router process that is asked for a request of another one asks that one, which answers with what it has itself.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from cluster.spec.ids import Room
from cluster.spec.messages import Gathered, Message, Timeline
from cluster.spec.registry import RankRow
from cluster.spec.step_messages import GiveTimeline
from cluster.spec.timeline import Interval
from router.errors import NoAnswerError

MAX_KEPT = 8
"""Timed requests known at once; the oldest makes room."""
GATHER_S = 30.0
"""Longest wait for ranks, which answer between two steps."""
AGAIN_S = 1.0
"""Between two times that another process is asked."""


@dataclass(slots=True)
class Gathering:
    """What is known here of one timed request."""

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

    async def settled(self, room: Room) -> Gathered:
        """All of it once every rank has answered, or after ``GATHER_S``; room: the request's name."""
        if self.ranks:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.whole.wait(), GATHER_S)
        return Gathered(room=room, timelines=self.timelines, missing=self.missing, router=self.router)


class Timelines:
    """Belongs to one event loop; every method is called from it."""

    def __init__(
        self,
        reply_to: str,
        tell: Callable[[str, Message], None],
        others: Callable[[], Mapping[Room, str]],
    ) -> None:
        """
        Args:
            reply_to: the inbox of this process.
            tell: sends a message to an inbox.
            others: the timed requests that other router processes know, and where to ask for each.
        """
        self._reply_to = reply_to
        self._tell = tell
        self._others = others
        self._gatherings: OrderedDict[Room, Gathering] = OrderedDict()
        """By the request's name."""
        self._asked: list[tuple[Room, asyncio.Future[Gathered]]] = []
        """What somebody waits for from another process."""
        self._giving: dict[GiveTimeline, asyncio.Task[None]] = {}
        """What another process waits for from here."""

    def told(self) -> dict[Room, str]:
        """The requests that this process can be asked for, and where."""
        return dict.fromkeys(self._gatherings, self._reply_to)

    def begin(self, room: Room, attempt: Room, ranks: Sequence[RankRow]) -> None:
        """An attempt of a timed request starts on these ranks."""
        self._gatherings[room] = Gathering(attempt, ranks)
        if len(self._gatherings) > MAX_KEPT:
            self._gatherings.popitem(last=False)

    def has(self, room: Room) -> bool:
        """Whether this is the name of a timed request that is still known."""
        return room in self._gatherings

    def end(self, room: Room, router: list[Interval]) -> None:
        """A timed request is over, with what the router saw of it; its ranks are asked for their parts."""
        gathering = self._gatherings[room]
        gathering.router = router
        ask = GiveTimeline(room=gathering.attempt, reply_to=self._reply_to)
        for rank in gathering.ranks:
            self._tell(rank.address, ask)

    def on_timeline(self, timeline: Timeline) -> None:
        """A rank answers; one that was not asked is passed over."""
        found = (gathering for gathering in self._gatherings.values() if gathering.attempt == timeline.room)
        gathering = next(found, None)
        if gathering is None or rank_name(timeline.replica, timeline.global_rank) not in gathering.missing:
            return
        gathering.timelines.append(timeline)
        if not gathering.missing:
            gathering.whole.set()

    async def gather(self, name: str) -> Gathered | None:
        """What is known of a timed request, here or at another process; None where none knows it.

        Args:
            name: in decimal.

        Raises:
            NoAnswerError: the process that knows it does not answer.
        """
        room = next((room for room in (*self._gatherings, *self._others()) if str(room) == name), None)
        if room is None:
            return None
        here = self._gatherings.get(room)
        return await (self._ask(room) if here is None else here.settled(room))

    def on_ask(self, ask: GiveTimeline) -> None:
        """Another process asks, perhaps again. What is not known here is not looked for elsewhere."""
        gathering = self._gatherings.get(ask.room)
        if gathering is not None and ask not in self._giving:
            self._giving[ask] = task = asyncio.ensure_future(self._give(ask, gathering))
            task.add_done_callback(lambda _: self._giving.pop(ask))

    def on_gathered(self, gathered: Gathered) -> None:
        """Another process answers; what nobody waits for is passed over."""
        for room, answer in self._asked:
            if room == gathered.room and not answer.done():
                answer.set_result(gathered)

    async def _give(self, ask: GiveTimeline, gathering: Gathering) -> None:
        self._tell(ask.reply_to, await gathering.settled(ask.room))

    async def _ask(self, room: Room) -> Gathered | None:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Gathered] = loop.create_future()
        asked = room, answer
        due_s = loop.time() + GATHER_S + 2 * AGAIN_S
        self._asked.append(asked)
        try:
            # Who has fallen silent, or has begun anew, does not say any more that it knows the request.
            while (address := self._others().get(room)) is not None:
                if loop.time() > due_s:
                    raise NoAnswerError(
                        f"the router process that has timeline {room} did not answer in {GATHER_S + 2 * AGAIN_S:g} s"
                    )
                self._tell(address, GiveTimeline(room=room, reply_to=self._reply_to))
                await asyncio.wait([answer], timeout=AGAIN_S)
                if answer.done():
                    return answer.result()
            return None
        finally:
            self._asked.remove(asked)


def rank_name(replica: str, global_rank: int) -> str:
    """What people call a rank."""
    return f"{replica} rank {global_rank}"
