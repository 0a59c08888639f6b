"""What the worker loop needs of a leader, whatever its role: messages and time in, messages and steps out."""

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Protocol

from cluster.spec.ids import Room
from cluster.spec.messages import Failure, Message, Submit
from cluster.spec.peer import Peer
from cluster.spec.registry import ReplicaLoad, TableSnapshot
from cluster.spec.sampling import Sampled
from cluster.spec.step_messages import StepPlan
from cluster.spec.tiers import FlushCache, PagesMoved, PinPages, Tier, UseStorage
from workers.cache.page_allocator import PageAllocator
from workers.hicache.tiers import Tiers
from workers.scheduler.page_reporter import PageReporter
from workers.timeline import Recorder

_REMEMBERED_ROOMS = 100_000


class Leader(Protocol):
    """The control state of one replica. Only the worker loop calls it, from one thread."""

    outgoing: list[tuple[str, Message]]
    """Messages to send, as (address, message); the loop takes them away."""
    must_end: str
    """Why this replica cannot go on; empty while it can."""

    def on_message(self, message: Message, now_s: float) -> None:
        """Take in one message; one that is late, foreign or unknown is counted and dropped."""
        ...

    def tick(self, now_s: float) -> None:
        """Let deadlines pass."""
        ...

    def has_work(self) -> bool:
        """Whether there is a step to compute now."""
        ...

    def next_deadline_s(self) -> float | None:
        """When something is due though no message comes; what may be seen a second late is left out."""
        ...

    def next_plan(self) -> StepPlan | None:
        """The next step, or None."""
        ...

    def commit(self, plan: StepPlan, sampled: Mapping[Room, Sampled], now_s: float) -> None:
        """Take in the outcome of the step."""
        ...

    def load(self) -> ReplicaLoad:
        """What the heartbeat tells the router."""
        ...

    def is_idle(self) -> bool:
        """No request is left in any state."""
        ...

    def check_integrity(self) -> None:
        """Prove that every page has exactly one holder; raises AssertionError."""
        ...


class LeaderCore:
    """What both leaders are made of: who they are, what they have to say, and which rooms have ended."""

    def __init__(self, me: Peer, allocator: PageAllocator, recorder: Recorder | None, tiers: Tiers | None) -> None:
        self.outgoing: list[tuple[str, Message]] = []
        self.must_end = ""
        self.dropped: Counter[str] = Counter()
        """Messages without effect, by type."""
        self.me = me
        self._allocator = allocator
        self.recorder = recorder or Recorder()
        self._now_s = 0.0
        """Clock time of the event at hand."""
        self.num_taken = 0
        """Requests since the start."""
        self.draining = False
        """Routers are asked for no new requests; those on their way are taken all the same."""
        self.ended = Tombstones()
        self.reporter = PageReporter(me, allocator, tiers)
        self.tiers = tiers

    def send(self, address: str, message: Message) -> None:
        """Leave a message for the loop to take."""
        self.outgoing.append((address, message))

    def next_deadline_s(self) -> float | None:
        """When a request has waited long enough for storage."""
        return self.tiers.next_deadline_s() if self.tiers else None

    def follow_cache(self) -> None:
        """Tell routers what has changed in the cache, and ranks what is to be copied."""
        self.outgoing += self.reporter.news()
        if self.tiers:
            self.outgoing += self.tiers.advance(self._now_s)

    def on_tier_message(self, message: PagesMoved | PinPages | UseStorage) -> None:
        """What concerns the tiers below the device cache; nothing where there are none."""
        match message:
            case PinPages() if self.tiers:
                self.tiers.pin(message.keys, is_pinned=message.is_pinned)
            case UseStorage() if self.tiers:
                self.tiers.attach(is_attached=message.is_attached)
            case PagesMoved() if self.tiers and self.tiers.on_answer(message, self._now_s):
                pass
            case _:
                self.drop(message)

    def record_arrival(self, submit: Submit, state: str) -> None:
        """A request is here, in its first state; if it is timed, its states are recorded from now on."""
        self.num_taken += 1
        if submit.timed:
            self.recorder.follow(submit.room)
        self.recorder.enter(submit.room, state, self._now_s)

    def send_failure(self, submit: Submit, reason: str, *, retryable: bool, mutual: bool = False) -> None:
        """Tell the router that this leg cannot finish the request; ``mutual`` if the other may be why."""
        failure = Failure(
            room=submit.room,
            replica=self.me.replica,
            incarnation=self.me.incarnation,
            reason=reason,
            retryable=retryable,
            mutual=mutual,
        )
        self.send(submit.router.address, failure)

    def flush(self, message: FlushCache) -> None:
        """Forget what is cached and needed by nobody."""
        if Tier.DEVICE in message.tiers:
            self._allocator.flush()
        if Tier.HOST in message.tiers and self.tiers:
            self.tiers.flush()

    def has_no_router(self, submit: Submit, table: TableSnapshot) -> bool:
        """Whether the router that would take the outputs is proven gone."""
        return table.reaped.get(submit.router.replica, 0) >= submit.router.incarnation

    def drop(self, message: Message) -> None:
        """Count a message that changes nothing."""
        self.dropped[type(message).__name__] += 1

    def too_large(self, num_pages: int, pool_pages: int) -> str | None:
        """Why a prompt of so many pages can never be served here."""
        if num_pages <= pool_pages:
            return None
        return f"the prompt needs {num_pages} pages, {self.me.replica} has {pool_pages}"


class Tombstones:
    """Rooms that have ended, so that a late message cannot bring one back. Remembers the most recent ones."""

    def __init__(self) -> None:
        self._rooms: OrderedDict[Room, str] = OrderedDict()

    def add(self, room: Room, reason: str) -> None:
        """Remember that this room has ended, and why."""
        self._rooms[room] = reason
        if len(self._rooms) > _REMEMBERED_ROOMS:
            self._rooms.popitem(last=False)

    def __contains__(self, room: Room) -> bool:
        return room in self._rooms

    def why(self, room: Room) -> str:
        """The reason for which a room ended that is in here."""
        return self._rooms[room]
