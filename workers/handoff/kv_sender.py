"""Sender of one rank's share of finished KV: one session per transfer, a writer thread, and the final reports."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, Protocol

from cluster.spec.clock import Interval
from cluster.spec.config import TransferConfig
from cluster.spec.ids import Peer, ReplicaId, Role, Room
from cluster.spec.kv import pages_for
from cluster.spec.registry import RankRow, Verify
from cluster.spec.step_messages import Admit, Destination, DropSend, ForgetPeer, ScheduledRequest, SendReport, StepPlan
from cluster.spec.transfer_messages import PageDigests, SendState
from transfer.digests import digest_pages
from transfer.page_assignment import (
    LEAST_SPAN_BYTES,
    PagePair,
    PageShare,
    early_ends,
    local_page,
    owned_pages,
    receivers,
    sent_groups,
)
from transfer.page_range import PageRange
from transfer.sender_session import SenderSession
from transfer.sender_thread import Cancelled, Outcome, SendJob, Write, WriteFailed, Writer, Written
from workers.handoff.post import Post, send_if_heard
from workers.trace.recorder import KV_SENDER, Recorder

Transfer = tuple[Room, int]
"""Transfer as room and generation."""
_Part = tuple[RankRow, PageRange, PageRange]
"""Decode rank, pages sent to it, and their destination."""


class Known(Protocol):
    """State of a request on a rank after a step."""

    @property
    def admit(self) -> Admit: ...
    @property
    def pages(self) -> Sequence[Sequence[int]]:
        """Page ids by lifetime."""
        ...


class SourceMemory(Protocol):
    """Memory that pages are sent from; see workers.memory.peer_memory."""

    def event(self) -> Any: ...
    def publish(self, pages: PageRange, after: Any) -> None: ...


class KvSender:
    """Sending half of one rank. The worker's thread calls the methods; outcomes arrive on the sender thread."""

    def __init__(
        self,
        *,
        prefill: Peer,
        row: RankRow,
        pool: memoryview,
        config: TransferConfig,
        outbox: Post,
        start_writer: Callable[[Callable[[Outcome], None]], Writer],
        recorder: Recorder | None = None,
        memory: SourceMemory | None = None,
        least_span_bytes: int = LEAST_SPAN_BYTES,
    ) -> None:
        """Take ownership of the outbox and the writer.

        Args:
            prefill: the replica this rank is part of; its leader gets the reports.
            pool: memory of this rank's pages that peers are sent from.
            memory: publishes computed pages to peers before they are sent; None where computed pages are visible.
            least_span_bytes: smallest span that is worth sending before a step is over.
            start_writer: makes the writer, which never reports an outcome before the call that asks for it has
            returned.
        """
        self._prefill = prefill
        self._row = row
        self._pool = pool
        self._config = config
        self._recorder = recorder or Recorder()
        self._memory = memory
        self._lock = threading.Lock()
        """Lock of the sessions and the outbox, which both threads use."""
        self._sessions: dict[Transfer, SenderSession] = {}
        self._early_ends = early_ends(row.layout, least_span_bytes) if row.role is Role.PREFILL else []
        self._num_gone: dict[Transfer, int] = {}
        """Number of layers sent before their step has ended, of the pages that the step completes."""
        self._failed: set[Room] = set()
        """Rooms of failed transfers, kept until no plan under way computes them."""
        self._newest_starts: dict[ReplicaId, Destination] = {}
        """Newest start of each decode replica that received KV."""
        self._outbox = outbox
        self._writer = start_writer(self._on_outcome)

    @property
    def num_open(self) -> int:
        """Return the number of open transfers."""
        return len(self._sessions)

    def before_step(self, plan: StepPlan) -> None:
        """Send the cached pages of requests that start in this step, while the step computes."""
        if plan.layerwise_load is not None:
            return  # not loaded yet
        admits = {admit.room: admit for admit in plan.admits if self._is_sent(admit)}
        with self._lock:
            for scheduled in plan.scheduled:
                if scheduled.room in admits and scheduled.first_position:
                    session = self._session(admits[scheduled.room])
                    if pairs := session.advance(scheduled.new_pages, scheduled.first_position):
                        self._writer.send(self._job(session, pairs))

    def during_step(self, plan: StepPlan, requests: Mapping[Room, Known]) -> Callable[[int], None] | None:
        """Return a callback for every layer that the step has stored, if some are sent before it is over.

        These are layers of prompts that end with the step: the pages of others travel while the next step computes.
        """
        if plan.layerwise_load is not None or not self._early_ends:
            return None
        return partial(self._on_stored, plan, requests)

    def _on_stored(self, plan: StepPlan, requests: Mapping[Room, Known], layer: int) -> None:
        if layer + 1 not in self._early_ends:
            return
        with self._lock:
            for scheduled in plan.scheduled:
                known = requests[scheduled.room]
                if self._is_sent(known.admit) and _ends_prompt(scheduled, known.admit):
                    session = self._session(known.admit)
                    if pairs := session.rest(known.pages):
                        self._writer.send(self._job(session, pairs, layer + 1))

    def after_step(self, plan: StepPlan, requests: Mapping[Room, Known]) -> None:
        """Send whatever is still unsent of the pages that this step completed."""
        with self._lock:
            for scheduled in plan.scheduled:
                known = requests[scheduled.room]
                if self._is_sent(known.admit):
                    session = self._session(known.admit)
                    pairs = session.advance(known.pages, scheduled.first_position + len(scheduled.token_ids))
                    if pairs:
                        self._writer.send(self._job(session, pairs))
                    self._end_if_over(session)
            self._failed.difference_update(plan.releases)

    def drop(self, message: DropSend) -> None:
        """Stop writing for a transfer, and report once no write is in flight. An unknown transfer has already ended."""
        transfer = (message.room, message.generation)
        with self._lock:
            session = self._sessions.get(transfer)
            if session is not None:
                session.cancel()
                self._writer.cancel(*transfer)
                return
            report = SendReport(
                room=message.room,
                generation=message.generation,
                sender_rank=self._row.global_rank,
                state=SendState.DRAINED,
            )
            send_if_heard(self._outbox, self._prefill.address, report)

    def forget(self, message: ForgetPeer) -> None:
        """Unmap the memory of a decode replica that is gone; an open mapping would keep it allocated."""
        with self._lock:
            known = self._newest_starts.get(message.replica)
            if known is not None and known.decode.incarnation <= message.incarnation:
                self._forget(self._newest_starts.pop(message.replica))

    def close(self) -> None:
        """Stop the writer and discard its queue."""
        self._writer.close()
        self._outbox.close()

    def _is_sent(self, admit: Admit) -> bool:
        """Return whether a request's KV is to be sent. A failed transfer has ended for the leader, so the prompt's next
        chunk must not restart it.
        """
        return admit.destination is not None and admit.room not in self._failed

    def _session(self, admit: Admit) -> SenderSession:
        assert admit.destination is not None
        transfer = (admit.room, admit.destination.generation)
        if transfer not in self._sessions:
            self._forget_older(admit.destination)
            row = self._row
            ranks = self._receivers(admit.destination)
            self._sessions[transfer] = SenderSession(
                room=admit.room,
                destination=admit.destination,
                prefill=self._prefill,
                sender_rank=row.global_rank,
                page_size=row.layout.page_size,
                owned=self._owned_pages(admit.owner_base, admit.destination),
                share=PageShare.of(ranks),
                sends=bool(ranks),
            )
        return self._sessions[transfer]

    def _receivers(self, destination: Destination) -> list[RankRow]:
        return receivers(self._config.mode, self._row.coords, self._row.sizes, destination.rows)

    def _owned_pages(self, base: int, destination: Destination) -> Sequence[int]:
        """Return the pages of a request that this rank owns, by position."""
        return owned_pages(
            self._config.mode,
            num_pages=pages_for(destination.num_tokens, self._row.layout.page_size),
            cp_rank=self._row.coords.cp,
            cp_size=self._row.sizes.cp,
            base=base,
            first=destination.num_held_pages,
        )

    def _forget_older(self, destination: Destination) -> None:
        """Unmap the memory of a decode replica's earlier start."""
        known = self._newest_starts.get(destination.decode.replica)
        if known is None or known.decode.incarnation < destination.decode.incarnation:
            if known is not None:
                self._forget(known)
            self._newest_starts[destination.decode.replica] = destination

    def _forget(self, destination: Destination) -> None:
        for row in destination.rows:
            self._writer.forget(row.endpoint)

    def _job(self, session: SenderSession, pairs: list[PagePair], end: int | None = None) -> SendJob:
        """Build the job for the unsent layers of these pages, to every decode rank that gets them from this rank.

        With ``end``, more layers follow; without it, the pages are complete.
        """
        layers = self._unsent_layers(session, end)
        by_lifetime = [(lifetime, list(of_one)) for lifetime, of_one in groupby(pairs, lambda pair: pair.lifetime)]
        sources = [self._source(lifetime, of_one, layers) for lifetime, of_one in by_lifetime]
        parts = [
            part
            for rank in self._receivers(session.destination)
            for lifetime, of_one in by_lifetime
            if (part := self._part(rank, lifetime, of_one, layers)) is not None
        ]
        is_complete = end is None
        return SendJob(
            room=session.room,
            generation=session.destination.generation,
            make_writes=partial(_writes, parts),
            num_pages=len(pairs) if is_complete else 0,
            make_ready=partial(self._make_ready, sources, self._event(), parts if is_complete else []),
        )

    def _unsent_layers(self, session: SenderSession, end: int | None) -> range:
        """Return the layers before ``end`` that were not sent early, and count them as sent."""
        transfer = (session.room, session.destination.generation)
        begin = self._num_gone.pop(transfer, 0)
        if end is not None:
            self._num_gone[transfer] = end
        return self._row.layout.layers[begin:end]

    def _source(self, lifetime: int, pairs: Sequence[PagePair], layers: range) -> PageRange:
        """Return the source range of these pages in this rank's pool."""
        pages = [local_page(self._row, pair.source) for pair in pairs]
        return PageRange(self._row.layout, pages, layers, lifetime=lifetime)

    def _part(self, rank: RankRow, lifetime: int, pairs: list[PagePair], layers: range) -> _Part | None:
        """Return the part of one lifetime's pages that goes to a decode rank; None if nothing does."""
        share = PageShare.of([rank])
        sent = pairs if share.is_all else [pair for pair in pairs if share.has(pair.target)]
        groups = sent_groups(self._row.coords, self._row.sizes, rank)
        source = replace(self._source(lifetime, sent, layers), groups=groups)
        if not replace(source, layers=None).num_bytes:
            return None
        return rank, source, PageRange(rank.layout, [pair.target for pair in sent], lifetime=lifetime)

    def _event(self) -> Any:
        """Record the event that marks all KV computed so far as written."""
        return self._memory.event() if self._memory is not None else None

    def _make_ready(self, sources: Sequence[PageRange], after: Any, whole: Sequence[_Part]) -> list[PageDigests]:
        """Publish the pages, and return digests of the complete ones. The sender thread calls this before it writes."""
        if self._memory is not None:
            for source in sources:
                self._memory.publish(source, after)
        if self._config.verify is not Verify.DIGEST:
            return []
        return [
            digest_pages(self._pool, replace(source, layers=None), rank.global_rank, target)
            for rank, source, target in whole
        ]

    def _on_outcome(self, outcome: Outcome) -> None:
        with self._lock:
            session = self._sessions.get((outcome.room, outcome.generation))
            if session is None:
                return
            match outcome:
                case Written():
                    seconds = outcome.end_s - outcome.start_s
                    session.written(outcome.num_pages, outcome.num_bytes, outcome.digests, seconds)
                    self._record(outcome)
                case WriteFailed():
                    session.failed(outcome.reason)
                case Cancelled():
                    session.drained()
            self._end_if_over(session)

    def _record(self, written: Written) -> None:
        facts: dict[str, int | float | str] = {"pages": written.num_pages, "bytes": written.num_bytes}
        self._recorder.add(written.room, Interval(KV_SENDER, "write", written.start_s, written.end_s, facts))

    def _end_if_over(self, session: SenderSession) -> None:
        """Send the final reports, first to decode, so that it has the page counts before the leader frees our pages."""
        if not session.is_over:
            return
        transfer = (session.room, session.destination.generation)
        del self._sessions[transfer]
        self._num_gone.pop(transfer, None)
        if session.state is SendState.FAILED and not session.saw_last_chunk:
            self._failed.add(session.room)
        if done := session.done():
            send_if_heard(self._outbox, session.destination.decode.address, done)
        send_if_heard(self._outbox, self._prefill.address, session.report())


def _ends_prompt(scheduled: ScheduledRequest, admit: Admit) -> bool:
    return (
        admit.destination is not None
        and scheduled.first_position + len(scheduled.token_ids) == admit.destination.num_tokens
    )


def _writes(parts: Sequence[_Part]) -> list[Write]:
    return [Write(rank.endpoint, source.spans_to(target)) for rank, source, target in parts]
