"""Requests in a decode leader: their states and transfer sessions, and the quarantine of their pages. Sans I/O."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from cluster.spec.clock import ClockReading
from cluster.spec.ids import Peer
from cluster.spec.phases import SAME_MACHINE, PhaseTimes, PromptTimes
from cluster.spec.registry import RankRecord, Verify
from cluster.spec.transfer_messages import Ticket
from transfer.page_assignment import copies_of
from transfer.receiver import ReceiverSession
from workers.cache.lifetimes import PageLists, live_pages
from workers.scheduler.sequence import TokenSequence
from workers.scheduler.step_scheduler import StepScheduler

QUARANTINE_LIMIT = 0.25
"""Share of the pool in quarantine above which a replica drains and restarts. Below it, a restart is not worthwhile."""


class DecodeState(Enum):
    QUEUED = "queued"
    """Waiting for free pages, for pages from storage, or for the first choice, which does not have the prompt yet."""
    RECEIVING = "receiving"
    """Pages allocated. Once no step under way can write to them, the ticket is sent, and prefill may write to them."""
    VERIFYING = "verifying"
    """Pages received. The ranks named in the digests compare their pages with the digests."""
    STOPPING = "stopping"
    """Failed or cancelled. Pages are held until prefill can no longer write to them."""
    RUNNING = "running"
    """Passed to the step scheduler, where the request may still wait for pages."""
    ENDED = "ended"
    """Ended. Holds no pages."""


MOVES = {
    DecodeState.QUEUED: frozenset({DecodeState.RECEIVING, DecodeState.RUNNING, DecodeState.ENDED}),
    DecodeState.RECEIVING: frozenset(
        {DecodeState.VERIFYING, DecodeState.RUNNING, DecodeState.STOPPING, DecodeState.ENDED}
    ),
    DecodeState.VERIFYING: frozenset({DecodeState.RUNNING, DecodeState.ENDED}),
    DecodeState.STOPPING: frozenset({DecodeState.ENDED}),
    DecodeState.RUNNING: frozenset({DecodeState.ENDED}),
    DecodeState.ENDED: frozenset[DecodeState](),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSettings:
    """Properties of a decode replica."""

    me: Peer
    records: Sequence[RankRecord]
    """Records of all ranks, by global rank."""
    dp_rank: int = 0
    transfer_timeout_s: float
    quarantine_limit: float = QUARANTINE_LIMIT
    verify: Verify = Verify.COUNTS
    settle_s: float
    """Maximum time for which bytes may still arrive after their sender has failed or died."""
    clock: ClockReading = SAME_MACHINE

    @property
    def page_bytes(self) -> list[int]:
        """Return the bytes per page by lifetime, summed over the DP rank. Ranks with the same heads count only once."""
        own = [record.layout for record in self.records if record.coords.dp == self.dp_rank]
        lifetimes = range(own[0].num_lifetimes)
        return [
            sum(layout.bytes_of(lifetime) for layout in own) // copies_of(self.records[0]) for lifetime in lifetimes
        ]


@dataclass(slots=True, eq=False, kw_only=True)
class DecodeRequest(TokenSequence):
    """Request in a decode leader. While RUNNING, it is in the step scheduler. It may have pages before that."""

    num_prompt_pages: int
    granted_s: float = 0.0
    """Time at which pages were allocated."""
    state: DecodeState = DecodeState.QUEUED
    num_held_pages: int = 0
    """Number of leading pages shared with the cache or another choice. They are never part of the ticket."""
    session: ReceiverSession | None = None
    stopping_since_s: float = 0.0
    """Time at which the request entered STOPPING."""
    has_prompt: bool = False
    """True once the prompt's KV and the first token have arrived or been computed."""

    @property
    def new_pages(self) -> PageLists:
        """Return the pages after the shared ones."""
        return [pages[self.num_held_pages :] for pages in self.kv.pages]

    def prompt_keys(self, page_size: int) -> list[bytes]:
        """Return the keys of the prompt pages that can be found in the cache."""
        # If this replica computes the prompt, the last token is always computed, for its logits.
        num_cacheable = len(self.submit.prompt_ids) - (self.submit.prefill is None)
        return self.keys_of(num_cacheable, page_size)

    def phases(self, clock: ClockReading, now_s: float) -> PhaseTimes | None:
        """Return the times of the phases up to the first token. None for a choice that shares a prompt."""
        submit, result = self.submit, self.session.result if self.session is not None else None
        if submit.prompt_of is not None:
            return None
        decode, granted_s = submit.decode.replica, self.granted_s
        here = PromptTimes(replica=decode, clock=clock, stored_s=granted_s, scheduled_s=granted_s, steps=self.steps)
        prompt = here if result is None or submit.prefill is None else result.times
        return PhaseTimes(decode=decode, clock=clock, granted_s=granted_s, sent_s=now_s, prompt=prompt)


def receiver_session(settings: DecodeSettings, request: DecodeRequest, prefill: Peer) -> ReceiverSession:
    pages = request.new_pages
    counts = [len(live_pages([of_lifetime])) for of_lifetime in pages]
    ticket = Ticket(
        room=request.room,
        decode=settings.me,
        prefill_incarnation=prefill.incarnation,
        pages=pages,
        num_held_pages=request.num_held_pages,
        dp_rank=settings.dp_rank,
        wanted_dp_rank=request.submit.dp_rank,
        geometry=settings.records[0].geometry,
    )
    return ReceiverSession(
        ticket,
        prefill,
        num_pages=sum(counts),
        num_bytes=sum(count * size for count, size in zip(counts, settings.page_bytes, strict=True)),
        num_ranks=len(settings.records),
        silence_s=settings.transfer_timeout_s,
        settle_s=settings.settle_s,
        verify=settings.verify,
        num_copies=copies_of(settings.records[0]),
    )


def stopping(requests: Iterable[DecodeRequest], since_s: float = math.inf) -> list[DecodeRequest]:
    """Return the requests that entered STOPPING at or before ``since_s``."""
    return [
        request for request in requests if request.state is DecodeState.STOPPING and request.stopping_since_s <= since_s
    ]


def count_pages(requests: Iterable[DecodeRequest]) -> int:
    return sum(len(live_pages(request.new_pages)) for request in requests)


def all_wait(requests: Iterable[DecodeRequest], scheduler: StepScheduler) -> bool:
    """Return whether all these requests wait for pages and none of them can get any now."""
    waiting = {DecodeState.QUEUED} if scheduler.holders.running else {DecodeState.QUEUED, DecodeState.RUNNING}
    return all(request.state in waiting for request in requests) and not scheduler.has_work()


def describe(requests: Sequence[DecodeRequest], num_pages: int, limit: float) -> str:
    """Return why these requests end the replica: too many pages are in quarantine, or all other requests wait."""
    is_beyond = count_pages(requests) > limit * num_pages
    reason = f"more than {limit:.0%} of the pool" if is_beyond else "and a request is waiting for them"
    names = ", ".join(sorted({request.session.prefill.replica for request in requests if request.session}))
    return (
        f"{count_pages(requests)} of {num_pages} pages are in quarantine, {reason}: "
        f"{names} did not confirm that writing has stopped"
    )
