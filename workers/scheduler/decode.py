"""Decode leader: from Submit to the last token. Sans I/O.

A request waits for pages, and prefill gets a ticket for them. The request joins the running batch when the Result and
every Done agree and the ranks have checked any digests. Its pages are freed only when nothing can write to them any
more. A request without prefill joins as soon as it has pages, and so do further choices, which share the first
choice's pages.
"""

from collections import deque
from collections.abc import Mapping
from typing import TypeGuard

from msgspec.structs import replace

from cluster.spec.errors import move
from cluster.spec.ids import Peer, Room
from cluster.spec.kv import pages_for
from cluster.spec.messages import Blame, Cancel, Inquire, Message, Output, Submit, TableUpdate
from cluster.spec.phases import ComputedStep
from cluster.spec.registry import ReplicaLoad, TableSnapshot
from cluster.spec.sampling import Sampled, TokenLogprobs
from cluster.spec.step_messages import StepPlan
from cluster.spec.tiers import CachedTokens
from cluster.spec.transfer_messages import Accepted, Done, Drained, PagesChecked, Refused, Result, Revoke, Ticket
from transfer.receiver import FailureKind, PageChecks, ReceiverSession, ReceiverState
from workers.cache.lifetimes import live_pages
from workers.context_parallel.shard_plan import idle_plan
from workers.scheduler.decode_queue import DecodeQueue
from workers.scheduler.decode_request import (
    MOVES,
    DecodeRequest,
    DecodeSettings,
    DecodeState,
    all_wait,
    count_pages,
    describe,
    receiver_session,
    stopping,
)
from workers.scheduler.leader import DpLeader
from workers.scheduler.sequence import KvState
from workers.scheduler.step_scheduler import StepScheduler
from workers.trace.recorder import Recorder


class DecodeLeader(DpLeader):
    """Decode leader of one DP rank."""

    def __init__(self, settings: DecodeSettings, scheduler: StepScheduler, recorder: Recorder | None = None) -> None:
        super().__init__(settings.me, scheduler, recorder)
        self._settings = settings
        self._requests: dict[Room, DecodeRequest] = {}
        self._queue = DecodeQueue(scheduler)
        self._received_pages: list[int] = []
        """Received pages that no plan has announced yet."""
        self._newest_step = 0
        self._delayed = deque[tuple[int, DecodeRequest]]()
        """Tickets held back while a step under way may write to their pages, as (newest such step, request)."""
        self._num_arrivals = 0
        self._is_quarantined = False
        self._checks = PageChecks([record.address for record in settings.records])

    def on_message(self, message: Message, now_s: float) -> None:
        self._now_s = now_s
        match message:
            case Submit():
                self._on_submit(message)
            case Cancel():
                self._on_cancel(message)
            case Inquire():
                self._on_inquire(message)
            case Accepted() | Result() | Done() | Refused() | Drained():
                self._on_prefill(message)
            case PagesChecked():
                self._on_checked(message)
            case TableUpdate():
                self._on_table(message.snapshot)
            case _:
                self.on_other(message)

    def tick(self, now_s: float) -> None:
        self._now_s = self._ticked_s = now_s
        for request in list(self._requests.values()):
            if request.session is not None and request.state is not DecodeState.RUNNING:
                self._follow_session(request, request.session, request.session.tick(self._heard_s()))
        self.inquire(request.submit for request in self._requests.values() if request.state is not DecodeState.STOPPING)
        for address, check in self._checks.repeat(now_s):
            self.send(address, check)
        self._start_granted()
        self._watch_quarantine()
        self.report_cache()

    def has_work(self) -> bool:
        return super().has_work() or bool(self._received_pages)

    def next_plan(self) -> StepPlan | None:
        # Received pages are announced even if there is nothing to compute.
        plan = self._scheduler.next_plan() or (idle_plan() if self._received_pages else None)
        self.report_cache()
        if plan is None:
            return None
        self.note_started(plan)
        self._newest_step = max(self._newest_step, plan.step)
        received_pages, self._received_pages = self._received_pages, []
        return replace(plan, received_pages=received_pages)

    def report_cache(self) -> None:
        # Every received page must first be announced to the ranks.
        if not self._received_pages:
            super().report_cache()

    def commit(self, plan: StepPlan, sampled: Mapping[Room, Sampled], step: ComputedStep) -> None:
        super().commit(plan, sampled, step)
        self._send_delayed_tickets(plan.step)
        self._start_granted()

    @property
    def _num_queued(self) -> int:
        return len(self._queue)

    def load(self) -> ReplicaLoad:
        return replace(
            super().load(),
            stopping_pages=count_pages(stopping(self._requests.values())),
            quarantined_pages=count_pages(self._quarantined()),
            wrong_pages=self._checks.num_wrong_pages,
            draining=self.draining or self._is_quarantined,
            num_preempted=self._scheduler.holders.num_preemptions,
        )

    def _on_token(self, room: Room, sampled: Sampled) -> None:
        request = self._requests[room]
        if problem := self.problem_of(sampled):
            reason, blame = problem
            self._fail(request, reason, retryable=False, blame=blame)
            return
        logprobs = [sampled.logprobs] if sampled.logprobs is not None else []
        output = self._newest_output(request, logprobs, completes_grammar=sampled.completes_grammar)
        if request.has_prompt:
            self._emit(request, output)
        else:
            cached = CachedTokens() if request.submit.prompt_of else request.kv.cached
            self._emit_first(request, replace(output, prompt_logprobs=sampled.prompt_logprobs, cached=cached))

    def _on_submit(self, submit: Submit) -> None:
        is_known = submit.room in self._requests or submit.room in self.ended
        if submit.decode.incarnation != self.me.incarnation or is_known:
            self.drop(submit)
            return
        page_size = self._scheduler.page_size
        num_pages = pages_for(len(submit.prompt_ids), page_size)
        request = DecodeRequest(
            submit,
            max_len=self._allocator.num_pages // self._allocator.lifetimes.num * page_size,
            num_prompt_pages=num_pages,
            arrival_number=self._num_arrivals,
        )
        self._num_arrivals += 1
        self._requests[submit.room] = request
        self.record_arrival(submit, request.state.value)
        if reason := self.too_large(num_pages):
            self._fail(request, reason, retryable=False)
        elif self._must_await(submit.prompt_of):
            self._queue.add_choice(request, submit.prompt_of)
        else:
            self._queue.add(request, self._now_s)

    def _must_await(self, first: Room | None) -> TypeGuard[Room]:
        """Return whether a choice must wait until the first choice, which may not have arrived yet, has the prompt."""
        if first is None or first in self.ended:
            return False
        request = self._requests.get(first)
        return request is None or not request.has_prompt

    def _start_granted(self) -> None:
        """Grant pages to waiting requests. Send their tickets or pass them to the step scheduler."""
        for request in self._queue.grant(self._now_s):
            request.granted_s = self._now_s
            if request.submit.prefill is not None:
                self._move(request, DecodeState.RECEIVING, "pages")
                self._send_ticket(request, request.submit.prefill)
            else:
                self._move(request, DecodeState.RUNNING, "pages")
                self._schedule(request, request.num_held_pages * self._scheduler.page_size)

    def _send_ticket(self, request: DecodeRequest, prefill: Peer) -> None:
        session = request.session = receiver_session(self._settings, request, prefill)
        if self._scheduler.num_under_way:
            self._delayed.append((self._newest_step, request))
        else:
            self.send(prefill.address, session.open(self._heard_s()))

    def _send_delayed_tickets(self, computed_step: int) -> None:
        """Send the tickets whose pages no step under way can write to."""
        while self._delayed and self._delayed[0][0] <= computed_step:
            _, request = self._delayed.popleft()
            if request.state is DecodeState.RECEIVING and request.session is not None:
                self.send(request.session.prefill.address, request.session.open(self._heard_s()))

    def _on_prefill(self, message: Accepted | Result | Done | Refused | Drained) -> None:
        request = self._requests.get(message.room)
        if request is None or request.session is None or request.state is DecodeState.RUNNING:
            self.drop(message)
            return
        num_dropped = request.session.num_dropped.total()
        answer = request.session.handle(message, self._heard_s())
        if request.session.num_dropped.total() > num_dropped:
            self.drop(message)
        self._follow_session(request, request.session, answer)

    def _follow_session(
        self, request: DecodeRequest, session: ReceiverSession, message: Ticket | Revoke | None
    ) -> None:
        if message is not None:
            self.send(session.prefill.address, message)
        if request.state is DecodeState.RECEIVING:
            if session.failure is not None:
                self._move(request, DecodeState.STOPPING, session.failure.reason)
                request.stopping_since_s = self._now_s
                if session.failure.kind is not FailureKind.CANCELLED:
                    self.send_failure(request.submit, session.failure.reason, retryable=True, blame=Blame.BOTH)
            elif session.state is ReceiverState.READY:
                self._verify(request, session)
        if request.state is DecodeState.STOPPING and session.may_free:
            self._end(request, "nothing writes to its pages any more")

    def _verify(self, request: DecodeRequest, session: ReceiverSession) -> None:
        """Start decoding. If there are digests, first ask the ranks named in them to compare their pages."""
        if not session.digests:
            self._begin_decoding(request, session)
            return
        self._move(request, DecodeState.VERIFYING, "result and all done")
        for address, message in self._checks.begin(request.room, session.digests, self._now_s):
            self.send(address, message)

    def _on_checked(self, checked: PagesChecked) -> None:
        request = self._requests.get(checked.room)
        if request is None or request.session is None or not self._checks.expects(checked):
            self.drop(checked)
            return
        num_wrong = self._checks.take(checked)
        if num_wrong is None:
            return
        if not num_wrong:
            self._begin_decoding(request, request.session)
            return
        reason = (
            f"{num_wrong} pages from {request.session.prefill.replica} do not match their digests at "
            f"{self.me.replica} (transfer.verify)"
        )
        self._fail(request, reason, retryable=True, blame=Blame.BOTH)

    def _begin_decoding(self, request: DecodeRequest, session: ReceiverSession) -> None:
        submit, result = request.submit, session.result
        assert result is not None
        self._checks.forget(request.room)
        self._move(request, DecodeState.RUNNING, "checked" if session.digests else "result and all done")
        if self.tiers:
            self.tiers.note_received(request.prompt_keys(self._scheduler.page_size))
        self._received_pages += live_pages(request.new_pages)
        request.tokens = [*submit.prompt_ids, *result.token_ids]
        self._schedule(request, len(submit.prompt_ids))
        output = self._newest_output(request, result.logprobs, completes_grammar=result.completes_grammar)
        self._emit_first(request, replace(output, prompt_logprobs=result.prompt_logprobs, cached=result.cached))

    def _schedule(self, request: DecodeRequest, num_computed: int) -> None:
        request.kv = KvState.after(num_computed, request.kv.pages)
        self._scheduler.add(request)

    def _newest_output(
        self, request: DecodeRequest, logprobs: list[TokenLogprobs], *, completes_grammar: bool
    ) -> Output:
        return Output(
            room=request.room,
            replica=self.me.replica,
            incarnation=self.me.incarnation,
            first_index=request.num_outputs - 1,
            token_ids=request.tokens[-1:],
            logprobs=logprobs,
            finish=request.finish_reason(completes_grammar=completes_grammar),
        )

    def _emit_first(self, request: DecodeRequest, output: Output) -> None:
        """Send a request's first token, which may be its last. Choices that share its pages get them beforehand."""
        request.has_prompt = True
        if choices := self._queue.end_wait(request.room):
            for choice in choices:
                self._queue.add(choice, self._now_s)
            self._start_granted()
        self._emit(request, replace(output, phases=request.phases(self._settings.clock, self._now_s)))

    def _emit(self, request: DecodeRequest, output: Output) -> None:
        if output.finish is not None:
            self._end(request, output.finish)
        self.send(request.submit.router.address, output)

    def _on_cancel(self, cancel: Cancel) -> None:
        request = self._requests.get(cancel.room)
        if cancel.incarnation != self.me.incarnation:
            self.drop(cancel)
        elif request is None:
            self._note_room_ended(cancel.room, "the request was cancelled")
        else:
            self._stop(request, "the request was cancelled")

    def _on_inquire(self, inquire: Inquire) -> None:
        """Report ended rooms to a router that missed their end. Unknown rooms count as ended."""
        if inquire.incarnation != self.me.incarnation:
            self.drop(inquire)
            return
        for room in inquire.rooms:
            request = self._requests.get(room)
            needed = request.submit.prompt_of if request else room
            if needed is not None and needed not in self._requests and needed not in self.ended:
                self._note_room_ended(needed, "the request never arrived")
            if room in self.ended:
                self.report_ended(inquire.sender, room)

    def _stop(self, request: DecodeRequest, reason: str) -> None:
        """End a request, or revoke its ticket so that its pages are freed once prefill can no longer write to them."""
        if request.state in (DecodeState.QUEUED, DecodeState.RUNNING, DecodeState.VERIFYING):
            self._end(request, reason)
        elif request.session is not None:
            self._follow_session(request, request.session, request.session.cancel(reason, self._heard_s()))

    def _on_table(self, snapshot: TableSnapshot) -> None:
        """End transfers from prefill replicas that are proven dead. Silent replicas may still write."""
        self.reporter.on_table(snapshot)
        for request in list(self._requests.values()):
            if snapshot.is_reaped(request.submit.router):
                self._stop(request, "the request's router is gone")
            session = request.session
            if session is None or request.state is DecodeState.RUNNING:
                continue
            if snapshot.is_reaped(session.prefill):
                session.prefill_gone(self._heard_s())
                self._follow_session(request, session, None)

    def _quarantined(self) -> list[DecodeRequest]:
        """Return the stopped requests whose confirmation from prefill is overdue."""
        settings = self._settings
        return stopping(self._requests.values(), self._now_s - settings.transfer_timeout_s - settings.settle_s)

    def _watch_quarantine(self) -> None:
        """Drain while too many pages are in quarantine. End the replica if no other request can make progress."""
        requests, num_pages, limit = self._quarantined(), self._allocator.num_pages, self._settings.quarantine_limit
        self._is_quarantined = count_pages(requests) > limit * num_pages
        others = [request for request in self._requests.values() if request not in requests]
        steps = self._scheduler
        goes_on = self._queue.awaits_storage or steps.holders.awaits_loads or steps.num_under_way > 0
        is_stuck = requests and not goes_on and all_wait(others, steps) and (self._is_quarantined or others)
        # While another DP rank has work, the replica goes on, and the pages may still be proven free.
        self.must_end = describe(requests, num_pages, limit) if is_stuck else ""

    def _fail(self, request: DecodeRequest, reason: str, *, retryable: bool, blame: Blame = Blame.SENDER) -> None:
        self.send_failure(request.submit, reason, retryable=retryable, blame=blame)
        self._stop(request, reason)

    def _note_room_ended(self, room: Room, event: str) -> None:
        """Remember that a room has ended, and fail the choices that wait for its prompt."""
        self.ended.add(room, event)
        for choice in self._queue.end_wait(room):
            reason = f"the first choice, which shares its prompt with this one, ended: {event}"
            self._fail(choice, reason, retryable=True, blame=Blame.NEITHER)

    def _end(self, request: DecodeRequest, event: str) -> None:
        self._queue.remove(request)
        if request.state is DecodeState.RUNNING:
            self._scheduler.holders.retire(request.room)
        self._move(request, DecodeState.ENDED, event)
        self.forget_in_tiers(request.room)
        self._allocator.free(live_pages(request.kv.pages))
        self._checks.forget(request.room)
        del self._requests[request.room]

    def _move(self, request: DecodeRequest, state: DecodeState, event: str) -> None:
        request.state = move(MOVES, request.state, state, event, f"room {request.room}")
        if state is DecodeState.STOPPING or state is DecodeState.ENDED:
            self._note_room_ended(request.room, event)
        self.recorder.enter(request.room, None if state is DecodeState.ENDED else state.value, self._now_s)
