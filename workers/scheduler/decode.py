"""The decode leader: from Submit to the last token. Sans I/O.

A request waits for pages, sends prefill one ticket for them, joins the running batch when Result and every Done agree,
and gives pages back only when nobody can still write to them.
"""

from collections.abc import Mapping

from cluster.spec.ids import Room
from cluster.spec.kv import pages_for
from cluster.spec.lifecycle import move
from cluster.spec.messages import (
    Cancel,
    Done,
    Drain,
    Drained,
    FlushCache,
    FollowPages,
    Message,
    Output,
    Refused,
    Result,
    Resume,
    Revoke,
    StepPlan,
    Submit,
    TableUpdate,
    Ticket,
)
from cluster.spec.page_key import page_keys
from cluster.spec.registry import ReplicaLoad, TableSnapshot
from cluster.spec.sampling import Sampled, TokenLogprobs
from transfer.receiver_session import FailureKind, ReceiverSession, ReceiverState
from workers.cache.page_allocator import PageAllocator
from workers.scheduler.decode_request import MOVES, DecodeRequest, DecodeSettings, DecodeState
from workers.scheduler.leader import LeaderCore
from workers.scheduler.sequence import Sequence
from workers.scheduler.steps import StepScheduler
from workers.scheduler.waiting import Waiting
from workers.timeline import Recorder


class DecodeLeader(LeaderCore):
    """See the module's first lines; the methods are those of ``Leader``."""

    def __init__(
        self,
        settings: DecodeSettings,
        steps: StepScheduler,
        allocator: PageAllocator,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__(settings.me, allocator, recorder)
        self._settings = settings
        self._steps = steps
        self._allocator = allocator
        self._requests: dict[Room, DecodeRequest] = {}
        self._queue = Waiting[DecodeRequest]()
        self._num_arrivals = 0

    def on_message(self, message: Message, now_s: float) -> None:
        """Take in one message; one that is late, foreign or unknown is counted and dropped."""
        self._now_s = now_s
        match message:
            case Submit():
                self._on_submit(message)
            case Cancel():
                self._on_cancel(message, now_s)
            case Result() | Done() | Refused() | Drained():
                self._on_prefill(message, now_s)
            case TableUpdate():
                self._on_table(message.snapshot, now_s)
            case Drain() | Resume():
                self.draining = isinstance(message, Drain)
            case FlushCache():
                self._allocator.flush()
            case FollowPages():
                self.outgoing += self.reporter.follow(message)
            case _:
                self.drop(message)
        self._reserve(now_s)

    def tick(self, now_s: float) -> None:
        """Send tickets again of which nothing was heard, revoke those of which too long; let bytes settle."""
        self._now_s = now_s
        for request in list(self._requests.values()):
            if request.session is not None and request.state is not DecodeState.RUNNING:
                self._follow(request, request.session, request.session.tick(now_s))
        self._reserve(now_s)
        self._watch_quarantine()
        self.send_page_news()

    def has_work(self) -> bool:
        """Whether there is a step to compute now."""
        return self._steps.has_work()

    def next_plan(self) -> StepPlan | None:
        """The next step, or None."""
        return self._steps.next_plan()

    def commit(self, plan: StepPlan, sampled: Mapping[Room, Sampled], now_s: float) -> None:
        """Stream the new tokens; end the requests that have their last one."""
        self._now_s = now_s
        for sequence in self._steps.commit(plan, sampled):
            request, drawn = self._requests[sequence.room], sampled[sequence.room]
            if drawn.problem:
                self.send_failure(request.submit, drawn.problem, retryable=False)
                self._stop(request, drawn.problem, now_s)
            else:
                self._emit(request, sequence, [drawn.logprobs] if drawn.logprobs is not None else [])
        self._reserve(now_s)
        self.send_page_news()

    def load(self) -> ReplicaLoad:
        """What the heartbeat tells the router."""
        return ReplicaLoad(
            num_waiting=len(self._queue) + self._steps.num_waiting,
            num_running=len(self._requests) - len(self._queue) - self._steps.num_waiting,
            num_tokens=sum(len(request.submit.prompt_ids) for request in self._requests.values()),
            free_pages=self._allocator.num_free,
            cached_pages=self._allocator.num_cached,
            total_pages=self._allocator.num_pages,
            quarantined_pages=sum(len(request.pages) - request.num_held for request in self._quarantined()),
            draining=self.draining,
            dropped=dict(self.dropped),
        )

    def is_idle(self) -> bool:
        """No request is left in any state."""
        return not self._requests

    def check_integrity(self) -> None:
        """Prove that every page has exactly one holder, or is cached and as often held as it is counted."""
        self._steps.check_integrity()
        ticketed = [page for request in self._requests.values() for page in request.pages]
        self._allocator.check_integrity(self._steps.held_pages + ticketed)

    def _on_submit(self, submit: Submit) -> None:
        is_known = submit.room in self._requests or submit.room in self.ended
        if submit.decode.incarnation != self.me.incarnation or is_known:
            self.drop(submit)
            return
        request = DecodeRequest(submit, arrival=self._num_arrivals)
        self._num_arrivals += 1
        if self._allocator.is_caching:
            request.page_keys = page_keys(submit.prompt_ids, self._settings.layout.page_size, submit.cache_salt)
        self._requests[submit.room] = request
        self.record_arrival(submit, request.state.value)
        self._queue.add(request)
        if self.draining:
            self._refuse(request, f"{self.me.replica} is draining", retryable=True)
        elif reason := self.too_large(self._pages_for(submit), self._allocator.num_pages):
            self._refuse(request, reason, retryable=False)

    def _reserve(self, now_s: float) -> None:
        """Ticket queued requests by priority while pages last; a retracted sequence goes first.

        Where one does not fit the next may, as far as the oldest one is not put off for ever.
        """
        if self._steps.num_waiting:
            return
        for request in self._queue.candidates():
            needed, num_passing = self._pages_for(request.submit), self._count_passing(request)
            assert self._queue.oldest is not None
            if not self._queue.may_pass(num_passing, self._pages_for(self._queue.oldest.submit)):
                continue
            held = self._allocator.find(request.page_keys)
            if self._allocator.can_allocate(needed, held):
                self._queue.note_passed(num_passing)
                self._queue.remove(request.room)
                request.pages = self._allocator.allocate(needed, held)
                request.num_held = len(held)
                self._move(request, DecodeState.RECEIVING, "pages")
                self._send_ticket(request, now_s)

    def _count_passing(self, request: DecodeRequest) -> int:
        """Pages that the oldest queued request might have to wait for if this one took them: none if both fit."""
        oldest = self._queue.oldest
        assert oldest is not None
        needed = self._pages_for(request.submit)
        fit = needed + self._pages_for(oldest.submit) <= self._allocator.num_free
        return 0 if request is oldest or fit else needed

    def _send_ticket(self, request: DecodeRequest, now_s: float) -> None:
        submit = request.submit
        pages = request.pages[request.num_held :]
        ticket = Ticket(
            room=submit.room,
            generation=1,
            decode=self.me,
            prefill_incarnation=submit.prefill.incarnation,
            pages=[pages],
            held_pages=request.num_held,
            geometry=self._settings.geometry,
        )
        request.session = ReceiverSession(
            ticket,
            submit.prefill,
            num_pages=len(pages),
            num_bytes=len(pages) * self._settings.page_bytes,
            silence_s=self._settings.transfer_timeout_s,
            settle_s=self._settings.settle_s,
        )
        self.send(submit.prefill.address, request.session.open(now_s))

    def _on_prefill(self, message: Result | Done | Refused | Drained, now_s: float) -> None:
        request = self._requests.get(message.room)
        if request is None or request.session is None or request.state is DecodeState.RUNNING:
            self.drop(message)
            return
        num_dropped = request.session.num_dropped.total()
        answer = request.session.handle(message, now_s)
        if request.session.num_dropped.total() > num_dropped:
            self.drop(message)
        self._follow(request, request.session, answer)

    def _follow(self, request: DecodeRequest, session: ReceiverSession, message: Ticket | Revoke | None) -> None:
        """Do what the session's new state asks for."""
        if message is not None:
            self.send(request.submit.prefill.address, message)
        if request.state is DecodeState.RECEIVING:
            if session.failure is not None:
                self._move(request, DecodeState.STOPPING, session.failure.reason)
                request.stopping_since_s = self._now_s
                if session.failure.kind is not FailureKind.CANCELLED:
                    self.send_failure(request.submit, session.failure.reason, retryable=True, mutual=True)
            elif session.state is ReceiverState.READY:
                self._start(request, session)
        if request.state is DecodeState.STOPPING and session.may_free:
            self._end(request, "nobody writes any more")

    def _start(self, request: DecodeRequest, session: ReceiverSession) -> None:
        submit = request.submit
        assert session.result is not None
        self._move(request, DecodeState.RUNNING, "result and all done")
        pages, request.pages = request.pages, []
        sequence = Sequence(
            room=submit.room,
            tokens=[*submit.prompt_ids, *session.result.token_ids],
            prompt_len=len(submit.prompt_ids) - submit.num_given,
            sampling=submit.sampling,
            stopping=submit.stopping,
            max_len=self._allocator.num_pages * self._settings.layout.page_size,
            computed_len=len(submit.prompt_ids),
            priority=submit.priority,
            cache_salt=submit.cache_salt,
            timed=submit.timed,
            page_keys=request.page_keys,
            pages=pages,
            is_whole=session.result.is_last,
        )
        self._steps.add_running(sequence)
        self._emit(request, sequence, session.result.logprobs, session.result.cached_tokens)

    def _emit(
        self, request: DecodeRequest, sequence: Sequence, logprobs: list[TokenLogprobs], cached_tokens: int = 0
    ) -> None:
        finish = sequence.finish_reason()
        if finish is not None:
            self._steps.retire(sequence.room)
            self._end(request, finish)
        self.send(
            request.submit.router.address,
            Output(
                room=sequence.room,
                replica=self.me.replica,
                incarnation=self.me.incarnation,
                first_index=sequence.num_outputs - 1,
                token_ids=sequence.tokens[-1:],
                logprobs=logprobs,
                finish=finish,
                cached_tokens=cached_tokens,
            ),
        )

    def _on_cancel(self, cancel: Cancel, now_s: float) -> None:
        request = self._requests.get(cancel.room)
        if cancel.incarnation != self.me.incarnation:
            self.drop(cancel)
        elif request is None:
            self.ended.add(cancel.room, "the request was cancelled")
        else:
            self._stop(request, "the request was cancelled", now_s)

    def _stop(self, request: DecodeRequest, reason: str, now_s: float) -> None:
        """Nobody wants the rest of a request."""
        if request.state is DecodeState.QUEUED:
            self._queue.remove(request.room)
            self._end(request, reason)
        elif request.state is DecodeState.RUNNING:
            self._steps.retire(request.submit.room)
            self._end(request, reason)
        elif request.session is not None:
            self._follow(request, request.session, request.session.cancel(reason, now_s))

    def _on_table(self, snapshot: TableSnapshot, now_s: float) -> None:
        """A prefill replica proven gone cannot write; one that is merely silent still might."""
        self.reporter.on_table(snapshot)
        for request in list(self._requests.values()):
            if self.has_no_router(request.submit, snapshot):
                self._stop(request, "its router is gone", now_s)
            reaped = snapshot.reaped.get(request.submit.prefill.replica)
            if reaped is None or request.session is None or request.state is DecodeState.RUNNING:
                continue
            request.session.prefill_gone(reaped, now_s)
            self._follow(request, request.session, None)

    def _quarantined(self) -> list[DecodeRequest]:
        """Those that were given up longer ago than any silence is waited for."""
        since_s = self._now_s - self._settings.transfer_timeout_s
        requests = self._requests.values()
        return [
            request
            for request in requests
            if request.state is DecodeState.STOPPING and request.stopping_since_s <= since_s
        ]

    def _watch_quarantine(self) -> None:
        """With too much of the pool in quarantine, take nothing more; at the end of what is at hand, begin anew."""
        quarantined = self._quarantined()
        num_pages = sum(len(request.pages) - request.num_held for request in quarantined)
        limit = self._settings.quarantine_limit
        if num_pages <= limit * self._allocator.num_pages:
            return
        self.draining = True
        if len(quarantined) == len(self._requests):
            names = ", ".join(sorted({request.submit.prefill.replica for request in quarantined}))
            self.must_end = (
                f"{num_pages} of {self._allocator.num_pages} pages are in quarantine, more than {limit:g} of them "
                f"(transfer.quarantine_limit): {names} did not say that it writes no more"
            )

    def _refuse(self, request: DecodeRequest, reason: str, *, retryable: bool) -> None:
        """Fail a request that holds nothing yet."""
        self._queue.remove(request.room)
        self.send_failure(request.submit, reason, retryable=retryable)
        self._end(request, reason)

    def _end(self, request: DecodeRequest, event: str) -> None:
        self._move(request, DecodeState.ENDED, event)
        self._allocator.free(request.pages)
        request.pages = []
        self.ended.add(request.submit.room, event)
        del self._requests[request.submit.room]

    def _pages_for(self, submit: Submit) -> int:
        return pages_for(len(submit.prompt_ids), self._settings.layout.page_size)

    def _move(self, request: DecodeRequest, target: DecodeState, event: str) -> None:
        request.state = move(MOVES, request.state, target, event, f"room {request.submit.room}")
        self.recorder.enter(request.submit.room, None if target is DecodeState.ENDED else target.value, self._now_s)
