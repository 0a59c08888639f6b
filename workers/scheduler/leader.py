"""Leader of either role: messages and times in, messages and steps out. Sans I/O."""

from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Mapping

from cluster.spec.clock import AttentiveClock
from cluster.spec.ids import Incarnation, Peer, ReplicaId, Room
from cluster.spec.messages import (
    INQUIRE_EVERY_S,
    Blame,
    Command,
    CommandResult,
    Drain,
    Failure,
    Inquire,
    Message,
    Resume,
    Submit,
    SubscribeKvEvents,
    Wanted,
)
from cluster.spec.phases import ComputedStep
from cluster.spec.registry import ReplicaLoad
from cluster.spec.sampling import Sampled
from cluster.spec.step_messages import StepPlan
from cluster.spec.tiers import FlushCache, PinPages, Tier, TierJobResult, UseStorage
from workers.cache.lifetimes import live_pages
from workers.scheduler.page_reporter import PageReporter
from workers.scheduler.sequence import TokenSequence
from workers.scheduler.step_scheduler import StepScheduler
from workers.trace.recorder import Recorder

REMEMBERED_ROOMS = 100_000
"""Maximum number of ended rooms that a leader remembers. The oldest rooms are forgotten first."""
LAG_S = 5.0
"""A pause of this process counts against a peer's deadline for at most this long. Most steps are shorter."""


class DpLeader(ABC):
    """Leader of one DP rank of a replica. Only the worker loop's thread calls it."""

    _requests: Mapping[Room, TokenSequence]
    """Requests that have not ended."""

    def __init__(self, me: Peer, scheduler: StepScheduler, recorder: Recorder | None) -> None:
        self.outgoing: list[tuple[str, Message]] = []
        """Messages to send, as (address, message). The loop takes them."""
        self.must_end = ""
        """Reason why this replica cannot continue. Empty while it can continue."""
        self.dropped: Counter[str] = Counter()
        """Number of messages without effect, by type."""
        self.me = me
        self._scheduler = scheduler
        self._allocator, self.tiers = scheduler.allocator, scheduler.tiers
        self.recorder = recorder or Recorder()
        self._now_s = 0.0
        """Time of the current event."""
        self._ticked_s = 0.0
        """Time of the latest tick, which has handled all earlier deadlines."""
        self._attentive_clock = AttentiveClock(LAG_S)
        self._inquire_at_s = 0.0
        self.num_taken = 0
        """Number of requests accepted since startup."""
        self._num_corrupted = 0
        self.draining = False
        """True while routers are asked not to send new requests. Requests in flight are still accepted."""
        self._newest_command: dict[tuple[ReplicaId, Incarnation], int] = {}
        """Newest command number by router."""
        self.ended = Tombstones()
        self.reporter = PageReporter(me, self._allocator, self.tiers)

    def _heard_s(self) -> float:
        """Attentive time of the current event, for deadlines of peers."""
        return self._attentive_clock.look(self._now_s)

    @abstractmethod
    def on_message(self, message: Message, now_s: float) -> None:
        """Handle one message. Late, foreign and unknown messages are counted and dropped."""

    @abstractmethod
    def tick(self, now_s: float) -> None:
        """Handle expired deadlines."""

    @abstractmethod
    def next_plan(self) -> StepPlan | None:
        """Return the next step. None if there is nothing to do."""

    def commit(self, plan: StepPlan, sampled: Mapping[Room, Sampled], step: ComputedStep) -> None:
        """Apply the outcome of a step, and record it in the requests whose prompts it computed."""
        self._now_s = step.end_s
        for scheduled in plan.scheduled:
            request = self._requests.get(scheduled.room)
            if request is not None and scheduled.output_position == request.submit.num_given:
                request.steps.append(step)
        for sequence in self._scheduler.commit(plan, sampled):
            self._on_token(sequence.room, sampled[sequence.room])

    @abstractmethod
    def _on_token(self, room: Room, sampled: Sampled) -> None:
        """Continue or end a request that has got a token."""

    def has_work(self) -> bool:
        return self._scheduler.has_work()

    def is_idle(self) -> bool:
        return not self._requests

    def has(self, room: Room) -> bool:
        return room in self._requests

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def num_tokens(self) -> int:
        """Number of prompt tokens of all requests. Choices that share a prompt count it once."""
        submits = (request.submit for request in self._requests.values())
        return sum(len(submit.prompt_ids) for submit in submits if submit.prompt_of is None)

    @property
    @abstractmethod
    def _num_queued(self) -> int:
        """Number of requests that the step scheduler does not have yet and that hold no pages."""

    def load(self) -> ReplicaLoad:
        num_waiting = self._num_queued + self._scheduler.num_waiting
        return ReplicaLoad(
            num_waiting=num_waiting,
            num_running=self.num_requests - num_waiting,
            num_tokens=self.num_tokens,
            free_pages=self._allocator.num_free,
            cached_pages=self._allocator.num_cached,
            evicted_pages=self._allocator.num_evicted,
            total_pages=self._allocator.num_pages,
            num_taken=self.num_taken,
            draining=self.draining,
            dropped=dict(self.dropped),
            num_corrupted=self._num_corrupted,
            tiers=self.tiers.state() if self.tiers else None,
        )

    def check_integrity(self) -> None:
        """Assert that the allocator counts each page's holders correctly."""
        holders = self._scheduler.holders
        holders.check_integrity()
        if self.tiers:
            self.tiers.host.check_integrity()
        others = [request for room, request in self._requests.items() if room not in holders.running]
        own = [page for request in others for page in live_pages(request.kv.pages)]
        self._allocator.check_integrity(holders.all_pages + own)

    def send(self, address: str, message: Message) -> None:
        self.outgoing.append((address, message))

    def next_deadline_s(self) -> float | None:
        """Return the earliest time at which a request stops waiting for storage. None if no request waits."""
        return self.tiers.prefetcher.next_deadline_s(self._ticked_s) if self.tiers else None

    def report_cache(self) -> None:
        """Report cache changes to routers, and send copy jobs to ranks."""
        self.outgoing += self.reporter.changes()
        if self.tiers:
            self.outgoing += self.tiers.advance(self._now_s)

    def note_started(self, plan: StepPlan) -> None:
        """Record requests that start in this step and no longer wait for storage."""
        for new in plan.new_requests:
            self.forget_in_tiers(new.room)

    def forget_in_tiers(self, room: Room) -> None:
        if self.tiers:
            self.tiers.prefetcher.forget(room, self._now_s)

    def on_other(self, message: Message) -> None:
        """Handle a message that both roles handle in the same way. Drop any other message."""
        match message:
            case Drain() | Resume():
                self.draining = isinstance(message, Drain)
                if self.tiers:
                    self.tiers.drain(is_draining=self.draining)
            case FlushCache():
                self._flush(message)
            case PinPages() if self.tiers:
                self.tiers.pin(message.keys, is_pinned=message.is_pinned)
            case UseStorage() if self.tiers:
                self.tiers.attach(is_attached=message.is_attached)
            case TierJobResult() if self.tiers and self.tiers.jobs.on_result(message, self._now_s):
                pass
            case Command() if message.incarnation == self.me.incarnation:
                self._on_command(message)
            case SubscribeKvEvents() if message.incarnation == self.me.incarnation:
                self.outgoing += self.reporter.subscribe(message.router)
            case _:
                self.drop(message)

    def record_arrival(self, submit: Submit, state: str) -> None:
        self.num_taken += 1
        if submit.traced:
            self.recorder.trace(submit.room)
        self.recorder.enter(submit.room, state, self._now_s)

    def send_failure(self, submit: Submit, reason: str, *, retryable: bool, blame: Blame) -> None:
        self.send(submit.router.address, self._failure(submit.room, reason, retryable, blame))

    def problem_of(self, sampled: Sampled) -> tuple[str, Blame] | None:
        """Return why a request cannot go on after a token, and what is to blame. Call this once for every token."""
        if sampled.is_corrupted:
            self._num_corrupted += 1
            return "the model's logits are not finite", Blame.MODEL
        return (sampled.problem, Blame.NEITHER) if sampled.problem else None

    def report_ended(self, router: Peer, room: Room) -> None:
        """Report to a router that a room has ended, in case the router missed the end."""
        reason = f"will report nothing more about the request: {self.ended.why(room)}"
        self.send(router.address, self._failure(room, reason, True, Blame.NEITHER))

    def inquire(self, submits: Iterable[Submit]) -> None:
        """Ask routers periodically whether they still need these requests, since a Cancel may have been lost."""
        if self._now_s < self._inquire_at_s:
            return
        self._inquire_at_s = self._now_s + INQUIRE_EVERY_S
        rooms: dict[Peer, list[Room]] = defaultdict(list)
        for submit in submits:
            rooms[submit.router].append(submit.room)
        for router, asked in rooms.items():
            self.send(router.address, Inquire(rooms=asked, sender=self.me, incarnation=router.incarnation))

    def _failure(self, room: Room, reason: str, retryable: bool, blame: Blame) -> Failure:
        return Failure(
            room=room,
            replica=self.me.replica,
            incarnation=self.me.incarnation,
            reason=reason,
            retryable=retryable,
            blame=blame,
        )

    def _on_command(self, command: Command) -> None:
        """Execute a command if possible, unless the router has sent a newer one, and report the result."""
        sender = command.sender.replica, command.sender.incarnation
        newest = self._newest_command.get(sender, 0)
        self._newest_command[sender] = max(newest, command.number)
        refusal = self._refusal(command.wanted)
        if not refusal and command.number > newest:
            self.on_other(command.wanted)
        pages = command.wanted.keys if isinstance(command.wanted, PinPages) else []
        answer = CommandResult(
            number=command.number,
            replica=self.me.replica,
            incarnation=self.me.incarnation,
            refusal=refusal,
            num_pinned=self.tiers.num_pinned_of(pages) if self.tiers else 0,
        )
        self.send(command.sender.address, answer)

    def _refusal(self, wanted: Wanted) -> str:
        """Return why this replica cannot execute a command. Empty if it can execute the command."""
        match wanted:
            case PinPages() | UseStorage() if self.tiers is None:
                return "no host memory is configured for cached pages (hicache.host_gib)"
            case PinPages(is_pinned=True) if self.tiers:
                return self.tiers.host.pins.refusal(wanted.keys)
            case UseStorage() if self.tiers:
                return self.tiers.refusal_of_storage()
            case _:
                return ""

    def _flush(self, message: FlushCache) -> None:
        if Tier.DEVICE in message.tiers:
            self._allocator.flush()
        if Tier.HOST in message.tiers and self.tiers:
            self.tiers.host.flush()

    def drop(self, message: Message) -> None:
        self.dropped[type(message).__name__] += 1

    def too_large(self, prompt_pages: int) -> str | None:
        """Return why a prompt with this many pages can never be served here. None if it can be served."""
        num_pages, pool_pages = prompt_pages * self._allocator.lifetimes.num, self._allocator.num_pages
        if num_pages <= pool_pages:
            return None
        return f"the prompt needs {num_pages} pages, but {self.me.replica} has {pool_pages}"


class Tombstones:
    """Record of recently ended rooms, so that late messages cannot revive them."""

    def __init__(self) -> None:
        self._rooms: OrderedDict[Room, str] = OrderedDict()

    def add(self, room: Room, reason: str) -> None:
        """Remember why a room ended. Later reasons are ignored."""
        self._rooms.setdefault(room, reason)
        if len(self._rooms) > REMEMBERED_ROOMS:
            self._rooms.popitem(last=False)

    def __contains__(self, room: Room) -> bool:
        return room in self._rooms

    def why(self, room: Room) -> str:
        return self._rooms[room]
