"""Prefill leader: from Submit and Ticket to Result, and the confirmation that writing has stopped. Sans I/O.

A request waits for its ticket and is computed in chunks while the ranks send complete pages. It keeps its pages until
every rank has reported that it will not read them again.
"""

from msgspec.structs import replace

from cluster.spec.errors import move
from cluster.spec.ids import Room, is_router
from cluster.spec.kv import owner_base, pages_for
from cluster.spec.messages import Blame, Cancel, Message, Submit, TableUpdate
from cluster.spec.registry import RankRecord, ReplicaLoad, TableSnapshot
from cluster.spec.sampling import Sampled
from cluster.spec.step_messages import CancelSend, Destination, ForgetPeer, SendReport, StepPlan
from cluster.spec.transfer_messages import Refused, Revoke, SendState, Ticket
from transfer.compatibility import geometry_refusal, refusal, ticket_refusal
from workers.scheduler.leader import DpLeader
from workers.scheduler.prefill_request import (
    MOVES,
    PrefillRequest,
    PrefillSettings,
    PrefillState,
    SendMeter,
    accepted,
    drained,
    result_of,
)
from workers.scheduler.step_scheduler import StepScheduler
from workers.trace.recorder import Recorder


class PrefillLeader(DpLeader):
    """Prefill leader of one DP rank."""

    def __init__(self, settings: PrefillSettings, scheduler: StepScheduler, recorder: Recorder | None = None) -> None:
        super().__init__(settings.me, scheduler, recorder)
        self._settings = settings
        self._requests: dict[Room, PrefillRequest] = {}
        self._sends = SendMeter()
        self._early_tickets: dict[Room, tuple[Ticket, float]] = {}
        """Tickets that arrived before their requests, with their deadlines."""
        self._table: TableSnapshot | None = None

    def on_message(self, message: Message, now_s: float) -> None:
        self._now_s = now_s
        match message:
            case Submit():
                self._on_submit(message)
            case Ticket():
                self._on_ticket(message)
            case Revoke():
                self._on_revoke(message)
            case Cancel():
                self._on_cancel(message)
            case SendReport():
                self._on_report(message)
            case TableUpdate():
                self._on_table(message.snapshot)
            case _:
                self.on_other(message)

    def tick(self, now_s: float) -> None:
        self._now_s = self._ticked_s = now_s
        for request in list(self._requests.values()):
            if request.state is PrefillState.STOPPING:
                self._end_if_settled(request)
            else:
                self._start_if_ready(request)
        for room, (ticket, deadline_s) in list(self._early_tickets.items()):
            if self._heard_s() >= deadline_s:
                del self._early_tickets[room]
                waited_s = self._settings.ticket_timeout_s
                reason = f"the request itself did not arrive from the router within {waited_s:g} s"
                self.ended.add(room, reason)
                self._refuse(ticket, reason)
        # Requests in other states have a ticket, so decode asks whether they are still needed.
        self.inquire(request.submit for request in self._requests.values() if request.state is PrefillState.QUEUED)
        self.report_cache()

    def next_plan(self) -> StepPlan | None:
        plan = self._scheduler.next_plan()
        if plan is not None:
            self.note_started(plan)
        self.report_cache()
        return plan

    @property
    def _num_queued(self) -> int:
        return sum(request.state is PrefillState.QUEUED for request in self._requests.values())

    def load(self) -> ReplicaLoad:
        return replace(super().load(), sends=self._sends.times)

    def is_idle(self) -> bool:
        return super().is_idle() and not self._early_tickets

    def _on_token(self, room: Room, sampled: Sampled) -> None:
        request = self._requests[room]
        request.is_computed = not sampled.is_corrupted
        if problem := self.problem_of(sampled):
            reason, blame = problem
            self._fail(request, reason, retryable=False, blame=blame)
            return
        self._scheduler.holders.remove(room)
        self._move(request, PrefillState.SENDING, "first token")
        self.send(request.submit.decode.address, result_of(self._settings, request, sampled))
        self._end_if_settled(request)

    def _on_submit(self, submit: Submit) -> None:
        room = submit.room
        is_known = room in self._requests or room in self.ended
        if submit.prefill is None or submit.prefill.incarnation != self.me.incarnation or is_known:
            self.drop(submit)
            return
        page_size, prompt_len = self._scheduler.page_size, len(submit.prompt_ids)
        base = owner_base(submit.prompt_ids, page_size, self._settings.record.sizes.cp, submit.cache_salt)
        request = PrefillRequest(submit, prompt_len + 1, owner_base=base)
        self._requests[room] = request
        # The last token is always computed, for its logits.
        if self.tiers and (keys := request.keys_of(prompt_len - 1, page_size)):
            self.tiers.expect(room, keys, self._now_s)
        self.record_arrival(submit, request.state.value)
        ticket, _ = self._early_tickets.pop(room, (None, 0.0))
        if ticket is not None and not _is_from_decode(submit, ticket):
            self.drop(ticket)
            ticket = None
        if reason := self.too_large(pages_for(prompt_len, page_size)):
            request.ticket = ticket
            self._fail(request, reason, retryable=False)
        elif ticket is not None:
            self._bind_ticket(request, ticket)

    def _on_ticket(self, ticket: Ticket) -> None:
        request = self._requests.get(ticket.room)
        if ticket.prefill_incarnation != self.me.incarnation:
            self.drop(ticket)
        elif ticket.room in self.ended:
            self._refuse(ticket, self.ended.why(ticket.room))
        elif request is None:
            self._early_tickets.setdefault(ticket.room, (ticket, self._heard_s() + self._settings.ticket_timeout_s))
        elif request.ticket is None and _is_from_decode(request.submit, ticket):
            self._bind_ticket(request, ticket)
        elif request.ticket == ticket and request.state is not PrefillState.STOPPING:
            self.send(ticket.decode.address, accepted(self.me, ticket))
        else:
            self.drop(ticket)

    def _bind_ticket(self, request: PrefillRequest, ticket: Ticket) -> None:
        request.ticket = ticket
        mine = self._settings.record
        reason = geometry_refusal(
            mine.replica, mine.geometry, ticket.decode.replica, ticket.geometry
        ) or ticket_refusal(ticket, len(request.submit.prompt_ids))
        if reason is not None:
            self._fail(request, reason, blame=Blame.BOTH)
        else:
            self._start_if_ready(request)

    def _on_table(self, table: TableSnapshot) -> None:
        """Start requests whose decode ranks have appeared, and fail requests that can never start."""
        self.reporter.on_table(table)
        known = self._table.reaped if self._table else {}
        self._table = table
        for replica, incarnation in table.reaped.items():
            if incarnation > known.get(replica, 0) and not is_router(replica):
                self._send_to_ranks(ForgetPeer(replica=replica, incarnation=incarnation))
        for request in list(self._requests.values()):
            self._start_if_ready(request)
            decode = request.submit.decode
            if request.state is PrefillState.QUEUED and table.is_gone(decode):
                self._fail(request, f"{decode.replica} was lost before it sent a ticket", blame=Blame.BOTH)
            elif table.is_reaped(request.submit.router):
                self._stop(request, "the request's router is gone")

    def _start_if_ready(self, request: PrefillRequest) -> None:
        """Pass a request to the step scheduler once its ticket, its stored pages and decode's records are available."""
        ticket = request.ticket
        if request.state is not PrefillState.QUEUED or ticket is None:
            return
        records = self._decode_records(ticket)
        if not records:
            return
        if reason := next(filter(None, (refusal(self._settings.record, record) for record in records)), None):
            self._fail(request, reason, blame=Blame.BOTH)
            return
        request.stored_s = request.stored_s or self._now_s
        if self.tiers and self.tiers.prefetcher.is_waiting(request.room, self._now_s):
            return
        request.destination = Destination(
            decode=ticket.decode,
            ranks=records,
            num_tokens=len(request.submit.prompt_ids),
            pages=ticket.pages,
            num_held_pages=ticket.num_held_pages,
        )
        self._move(request, PrefillState.SCHEDULED, "ticket")
        request.scheduled_s = self._now_s
        self._scheduler.add(request)

    def _decode_records(self, ticket: Ticket) -> list[RankRecord]:
        """Return the records of the decode ranks that own the ticket's pages. Empty if they are not known yet."""
        entry = self._table.find(ticket.decode.replica) if self._table else None
        if entry is None or entry.incarnation != ticket.decode.incarnation:
            return []
        return [record for record in entry.ranks if record.coords.dp == ticket.dp_rank]

    def _on_revoke(self, revoke: Revoke) -> None:
        if revoke.prefill_incarnation != self.me.incarnation:
            self.drop(revoke)
            return
        request = self._requests.get(revoke.room)
        if request is not None and not _is_from_decode(request.submit, revoke):
            self.drop(revoke)
            return
        self._early_tickets.pop(revoke.room, None)
        if request is None:
            self.ended.add(revoke.room, "decode revoked its ticket")
            self.send(revoke.decode.address, drained(self.me, revoke))
            return
        request.is_revoked = True
        if request.ticket is None:
            self._end(request, "revoke")
            self.send(revoke.decode.address, drained(self.me, revoke))
        else:
            self._stop(request, "decode revoked its ticket")

    def _on_cancel(self, cancel: Cancel) -> None:
        if cancel.incarnation != self.me.incarnation:
            self.drop(cancel)
            return
        request = self._requests.get(cancel.room)
        if request is not None:
            self._stop(request, "the request was cancelled")
            return
        self.ended.add(cancel.room, "the request was cancelled")
        ticket, _ = self._early_tickets.pop(cancel.room, (None, 0.0))
        if ticket is not None:
            self._refuse(ticket, "the request was cancelled")

    def _on_report(self, report: SendReport) -> None:
        request = self._requests.get(report.room)
        if request is None or request.ticket is None:
            self.drop(report)
            return
        request.reported.add(report.sender_rank)
        self._sends.add(report)
        if report.state is SendState.FAILED:
            request.quiet_at_s = self._now_s + self._settings.settle_s
            if request.state is not PrefillState.STOPPING:
                reason = f"rank {report.sender_rank} of {self.me.replica}: {report.reason}"
                self._fail(request, reason, blame=Blame.BOTH)
        self._end_if_settled(request)

    def _end_if_settled(self, request: PrefillRequest) -> None:
        """End the request once no rank and no bytes in flight can access its pages."""
        all_reported = len(request.reported) == len(self._settings.rank_addresses)
        if not all_reported or self._now_s < request.quiet_at_s:
            return
        if request.state in (PrefillState.SENDING, PrefillState.STOPPING):
            stopped = request.state is PrefillState.STOPPING
            self._end(request, "all ranks reported")
            if stopped:
                self._confirm_stopped(request)

    def _stop(self, request: PrefillRequest, reason: str) -> None:
        """Stop computing and sending a request. Its pages are freed once every rank has stopped."""
        if request.state is PrefillState.QUEUED:
            self._end(request, reason)
            if request.ticket is not None:
                request.stop_reason = reason
                self._confirm_stopped(request)
            return
        if request.state is not PrefillState.STOPPING:
            if request.state is PrefillState.SCHEDULED:
                self._scheduler.holders.remove(request.room)
            self._move(request, PrefillState.STOPPING, reason)
            request.stop_reason = reason
        # Decode repeats its Revoke, and with it this message, which may be lost like a rank's report.
        self._send_to_ranks(CancelSend(room=request.room))
        self._end_if_settled(request)

    def _send_to_ranks(self, message: Message) -> None:
        for address in self._settings.rank_addresses:
            self.send(address, message)

    def _fail(
        self, request: PrefillRequest, reason: str, *, retryable: bool = True, blame: Blame = Blame.SENDER
    ) -> None:
        self.send_failure(request.submit, reason, retryable=retryable, blame=blame)
        self._stop(request, reason)

    def _confirm_stopped(self, request: PrefillRequest) -> None:
        """Report to decode that nothing more will be written: Drained if decode revoked the ticket, else Refused."""
        ticket = request.ticket
        assert ticket is not None
        if request.is_revoked:
            self.send(ticket.decode.address, drained(self.me, ticket))
        else:
            self._refuse(ticket, request.stop_reason)

    def _end(self, request: PrefillRequest, event: str) -> None:
        self._move(request, PrefillState.ENDED, event)
        self.forget_in_tiers(request.room)
        keys = self._scheduler.holders.keys(request, request.kv.num_computed_tokens) if request.is_computed else []
        self._allocator.keep(request.kv.pages, keys)
        self.ended.add(request.room, request.stop_reason or event)
        del self._requests[request.room]

    def _move(self, request: PrefillRequest, state: PrefillState, event: str) -> None:
        request.state = move(MOVES, request.state, state, event, f"room {request.room}")
        self.recorder.enter(request.room, None if state is PrefillState.ENDED else state.value, self._now_s)

    def _refuse(self, ticket: Ticket, reason: str) -> None:
        refused = Refused(
            room=ticket.room,
            prefill=self.me,
            decode_incarnation=ticket.decode.incarnation,
            reason=reason,
        )
        self.send(ticket.decode.address, refused)


def _is_from_decode(submit: Submit, message: Ticket | Revoke) -> bool:
    """Return whether a message comes from the replica incarnation that decodes the request."""
    return (message.decode.replica, message.decode.incarnation) == (submit.decode.replica, submit.decode.incarnation)
