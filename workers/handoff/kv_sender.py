"""Sender of one rank's computed KV.

When a step ends, each transfer's session returns the complete pages that this rank must send. A job describes them for
every receiving decode rank, and the sender thread writes them. After the last write, the sender reports to decode and
the leader.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

from cluster.channel import Post, send_or_log
from cluster.spec.clock import Interval
from cluster.spec.config import TransferConfig
from cluster.spec.ids import Incarnation, Peer, ReplicaId, Role, Room
from cluster.spec.kv import pages_for
from cluster.spec.registry import Endpoint, RankRecord, Verify
from cluster.spec.step_messages import CancelSend, Destination, ForgetPeer, NewRequest, SendReport, StepPlan
from cluster.spec.transfer_messages import PageDigests, SendState
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
from transfer.page_range import PageRange, digest_pages
from transfer.sender import Cancelled, Outcome, SenderSession, SendJob, SpanWriter, Write, WriteFailed, Written
from workers.trace.recorder import KV_SENDER, Recorder

if TYPE_CHECKING:  # imports torch
    from workers.memory.peer_memory import PeerMemory

_Part = tuple[RankRecord, PageRange, PageRange]
"""Decode rank, pages sent to it, and their destination."""


@dataclass(slots=True)
class _Transfer:
    session: SenderSession
    receivers: Sequence[RankRecord]
    """Decode ranks to which this rank sends."""
    num_layers_sent: int = 0
    """Number of layers already sent of the pages that the current step completes."""


class OutgoingRequest(Protocol):
    """Request to send, with its pages on this rank."""

    @property
    def room(self) -> Room: ...
    @property
    def owner_base(self) -> int: ...
    @property
    def destination(self) -> Destination | None: ...
    @property
    def pages(self) -> Sequence[Sequence[int]]: ...


class KvSender:
    """KV sender of one rank. The worker's main thread calls its methods. Outcomes arrive on the sender thread."""

    def __init__(
        self,
        *,
        prefill: Peer,
        record: RankRecord,
        region: memoryview,
        config: TransferConfig,
        outbox: Post,
        start_writer: Callable[[Callable[[Outcome], None]], SpanWriter],
        recorder: Recorder | None = None,
        memory: "PeerMemory | None" = None,
        least_span_bytes: int = LEAST_SPAN_BYTES,
    ) -> None:
        """Take ownership of the outbox and the writer.

        Args:
            prefill: replica of this rank. Its leader receives the reports.
            region: memory that holds this rank's pages.
            memory: publishes computed pages to peers before they are sent. None if peers can read computed pages
                directly.
            least_span_bytes: smallest span worth sending before a step ends.
            start_writer: creates the writer, which reports outcomes only after ``send`` or ``cancel`` has returned.
        """
        self._prefill = prefill
        self._record = record
        self._region = region
        self._config = config
        self._recorder = recorder or Recorder()
        self._memory = memory
        self._lock = threading.Lock()
        """Lock that guards the transfers and the outbox, which both threads use."""
        self._transfers: dict[Room, _Transfer] = {}
        """Open transfers by room."""
        self._early_ends = early_ends(record.layout, least_span_bytes) if record.role is Role.PREFILL else []
        self._failed: set[Room] = set()
        """Rooms of failed transfers. A room is kept until the leader's CancelSend, which follows the last step that
        computes its request.
        """
        self._mapped: dict[ReplicaId, dict[Endpoint, Incarnation]] = {}
        """Memory of each decode replica that transfers may have mapped, with the incarnations that own it."""
        self._outbox = outbox
        self._writer = start_writer(self._on_outcome)

    @property
    def num_open(self) -> int:
        return len(self._transfers)

    def before_step(self, plan: StepPlan) -> None:
        """Send the cached pages of requests that start in this step, while the step computes."""
        if plan.layerwise_load is not None:
            return  # the cached pages are not loaded yet
        new_requests = {request.room: request for request in plan.new_requests if self._is_outgoing(request)}
        with self._lock:
            for scheduled in plan.scheduled:
                if scheduled.room in new_requests and scheduled.first_position:
                    transfer = self._transfer(new_requests[scheduled.room])
                    self._send(transfer, transfer.session.advance(scheduled.new_pages, scheduled.first_position))

    def layer_callback(self, plan: StepPlan, requests: Mapping[Room, OutgoingRequest]) -> Callable[[int], None] | None:
        """Return a callback to call for each stored layer. None if no layer is sent before the step ends.

        Only prompts that end with this step are sent early. Other prompts' pages are sent while the next step computes.
        """
        if plan.layerwise_load is not None or not self._early_ends:
            return None
        return partial(self._on_stored, plan, requests)

    def _on_stored(self, plan: StepPlan, requests: Mapping[Room, OutgoingRequest], layer: int) -> None:
        if layer + 1 not in self._early_ends:
            return
        with self._lock:
            for transfer, request, num_computed in self._outgoing(plan, requests):
                if num_computed == transfer.session.destination.num_tokens:
                    self._send(transfer, transfer.session.rest(request.pages), layer + 1)

    def after_step(self, plan: StepPlan, requests: Mapping[Room, OutgoingRequest]) -> None:
        """Send the pages that this step completed, except layers that were sent during the step."""
        with self._lock:
            for transfer, request, num_computed in self._outgoing(plan, requests):
                self._send(transfer, transfer.session.advance(request.pages, num_computed))
                self._end_if_over(transfer.session)

    def _outgoing(
        self, plan: StepPlan, requests: Mapping[Room, OutgoingRequest]
    ) -> Iterator[tuple[_Transfer, OutgoingRequest, int]]:
        """Yield the transfer, request and computed tokens of each scheduled request whose KV is sent."""
        for scheduled in plan.scheduled:
            request = requests[scheduled.room]
            if self._is_outgoing(request):
                yield self._transfer(request), request, scheduled.first_position + len(scheduled.token_ids)

    def _is_outgoing(self, request: NewRequest | OutgoingRequest) -> bool:
        """Return whether a request's KV is sent. A failed transfer must not restart with the prompt's next chunk."""
        return request.destination is not None and request.room not in self._failed

    def _transfer(self, request: NewRequest | OutgoingRequest) -> _Transfer:
        """Return the request's transfer. Open it if necessary."""
        record, mode, destination = self._record, self._config.mode, request.destination
        assert destination is not None
        if request.room not in self._transfers:
            self._note_mapped(destination)
            ranks = receivers(mode, record.coords, record.sizes, destination.ranks)
            owned = owned_pages(
                mode,
                num_pages=pages_for(destination.num_tokens, record.layout.page_size),
                cp_rank=record.coords.cp,
                cp_size=record.sizes.cp,
                base=request.owner_base,
                first=destination.num_held_pages,
            )
            session = SenderSession(
                room=request.room,
                destination=destination,
                prefill=self._prefill,
                sender_rank=record.global_rank,
                page_size=record.layout.page_size,
                owned=owned,
                share=PageShare.of(ranks),
            )
            self._transfers[request.room] = _Transfer(session, ranks)
        return self._transfers[request.room]

    def _send(self, transfer: _Transfer, pairs: list[PagePair], end: int | None = None) -> None:
        if pairs:
            self._writer.send(self._job(transfer, pairs, end))

    def _job(self, transfer: _Transfer, pairs: list[PagePair], end: int | None) -> SendJob:
        """Build the job that sends the unsent layers of these pages to the decode ranks.

        Layers from ``end`` on follow in a later job. If ``end`` is None, this job completes the pages.
        """
        is_complete = end is None
        layers = self._record.layout.layers[transfer.num_layers_sent : end]
        transfer.num_layers_sent = end or 0
        by_lifetime = [list(of_one) for _, of_one in groupby(pairs, lambda pair: pair.lifetime)]
        parts = [
            part
            for rank in transfer.receivers
            for of_one in by_lifetime
            if (part := self._part(rank, of_one, layers)) is not None
        ]
        sources = [self._source(of_one, layers) for of_one in by_lifetime]
        after = self._memory.event() if self._memory is not None else None
        return SendJob(
            room=transfer.session.room,
            prepare=partial(self._prepare, sources, after, parts, is_complete=is_complete),
            num_pages=len(pairs) if is_complete else 0,
        )

    def _source(self, pairs: Sequence[PagePair], layers: range) -> PageRange:
        """Return these pages, which share a lifetime, as a range of this rank's pool."""
        pages = [local_page(self._record, pair.source) for pair in pairs]
        return PageRange(self._record.layout, pages, layers, lifetime=pairs[0].lifetime)

    def _part(self, rank: RankRecord, pairs: list[PagePair], layers: range) -> _Part | None:
        """Return the part of these pages to send to a decode rank. None if that rank gets none of them."""
        share = PageShare.of([rank])
        sent = [pair for pair in pairs if share.has(pair.target)]
        if not sent:
            return None
        source = replace(self._source(sent, layers), groups=sent_groups(self._record.coords, self._record.sizes, rank))
        if not replace(source, layers=None).num_bytes:
            return None
        return rank, source, PageRange(rank.layout, [pair.target for pair in sent], lifetime=source.lifetime)

    def _prepare(
        self, sources: Sequence[PageRange], after: Any, parts: Sequence[_Part], *, is_complete: bool
    ) -> tuple[list[Write], list[PageDigests]]:
        """Publish the pages. Return their writes, and their digests if they are complete. Runs on the sender thread."""
        if self._memory is not None:
            for source in sources:
                self._memory.publish(source, after)
        writes = _writes(parts)
        if not is_complete or self._config.verify is not Verify.DIGEST:
            return writes, []
        return writes, [
            digest_pages(self._region, replace(source, layers=None), rank.global_rank, target)
            for rank, source, target in parts
        ]

    def _on_outcome(self, outcome: Outcome) -> None:
        with self._lock:
            transfer = self._transfers.get(outcome.room)
            if transfer is None:
                return
            session = transfer.session
            match outcome:
                case Written():
                    seconds = outcome.end_s - outcome.start_s
                    session.written(outcome.num_pages, outcome.num_bytes, outcome.digests, seconds)
                    facts: dict[str, int | float | str] = {"pages": outcome.num_pages, "bytes": outcome.num_bytes}
                    interval = Interval(KV_SENDER, "write", outcome.start_s, outcome.end_s, facts)
                    self._recorder.add(outcome.room, interval)
                case WriteFailed():
                    # After a cancellation, no step computes the request.
                    if session.state is SendState.SENDING and not session.saw_last_chunk:
                        self._failed.add(session.room)
                    session.failed(outcome.reason)
                case Cancelled():
                    session.drained()
            self._end_if_over(session)

    def _end_if_over(self, session: SenderSession) -> None:
        """Send the final reports of a transfer that is over.

        The Done for decode is sent first, so that its page counts arrive before the leader frees the source pages.
        """
        if not session.is_over:
            return
        del self._transfers[session.room]
        if done := session.done():
            send_or_log(self._outbox, session.destination.decode.address, done)
        send_or_log(self._outbox, self._prefill.address, session.report())

    def cancel(self, message: CancelSend) -> None:
        """Stop writing for a transfer, even an unknown one, and report once no write is in flight."""
        with self._lock:
            self._failed.discard(message.room)
            if (transfer := self._transfers.get(message.room)) is not None:
                transfer.session.cancel()
                self._writer.cancel(message.room)
                return
            report = SendReport(
                room=message.room,
                sender_rank=self._record.global_rank,
                state=SendState.DRAINED,
            )
            send_or_log(self._outbox, self._prefill.address, report)

    def forget(self, message: ForgetPeer) -> None:
        """Unmap the memory of a dead decode replica. An open mapping would keep the memory allocated."""
        with self._lock:
            self._forget(message.replica, message.incarnation)

    def _note_mapped(self, destination: Destination) -> None:
        """Remember the memory of a destination, which is one DP rank's, and unmap that of earlier incarnations."""
        decode = destination.decode
        self._forget(decode.replica, Incarnation(decode.incarnation - 1))
        known = self._mapped.setdefault(decode.replica, {})
        known.update((record.endpoint, decode.incarnation) for record in destination.ranks)

    def _forget(self, replica: ReplicaId, newest: Incarnation) -> None:
        """Unmap the memory of a decode replica's incarnations up to ``newest``."""
        known = self._mapped.pop(replica, {})
        for endpoint, incarnation in known.items():
            if incarnation <= newest:
                self._writer.forget(endpoint)
        if left := {endpoint: owner for endpoint, owner in known.items() if owner > newest}:
            self._mapped[replica] = left

    def close(self) -> None:
        """Stop the writer and discard its queue."""
        self._writer.close()
        self._outbox.close()


def _writes(parts: Sequence[_Part]) -> list[Write]:
    return [Write(rank.endpoint, source.spans_to(target)) for rank, source, target in parts]
