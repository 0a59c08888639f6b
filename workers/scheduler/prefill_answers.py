"""Messages from prefill to decode that end a ticket."""

from cluster.spec.peer import Peer
from cluster.spec.ranks import coords_of, world_size
from cluster.spec.sampling import Sampled
from cluster.spec.step_messages import Target
from cluster.spec.tiers import CachedTokens
from cluster.spec.transfer_messages import Drained, Refused, Result, Revoke, Ticket
from transfer.plan import PageShare, receivers
from workers.cache.page_lists import live_pages
from workers.scheduler.prefill_request import PrefillRequest, PrefillSettings


def result_of(
    settings: PrefillSettings,
    request: PrefillRequest,
    target: Target,
    first: Sampled,
    cached: CachedTokens,
    now_s: float,
) -> Result:
    """Return the first token, and the number of bytes that all senders together will have written."""
    assert request.ticket is not None
    row = settings.row
    coords = [coords_of(rank, row.sizes) for rank in range(world_size(row.sizes))]
    receivers_of = {
        rank: targets
        for rank, at in enumerate(coords)
        if at.dp == row.coords.dp and (targets := receivers(row.transfer_mode, at, row.sizes, target.rows))
    }
    # CP ranks that hold the same heads and layers divide the pages.
    parts = {(coords[rank].tp, coords[rank].pp): targets for rank, targets in receivers_of.items()}
    return Result(
        room=request.submit.room,
        generation=request.ticket.generation,
        prefill=settings.me,
        decode_incarnation=request.ticket.decode.incarnation,
        token_ids=[first.token_id],
        is_last=first.is_last,
        logprobs=[first.logprobs] if first.logprobs is not None else [],
        prompt_logprobs=first.prompt_logprobs,
        cached=cached,
        bootstrap_s=request.scheduled_s - request.arrived_s,
        prefill_s=now_s - request.scheduled_s,
        senders=list(receivers_of),
        num_pages=sum(PageShare.of(part).count(live_pages(target.pages)) for part in parts.values()),
        num_bytes=sum(
            row.layout.bytes_of(lifetime) * PageShare.of([row]).count(live_pages([pages]))
            for row in target.rows
            for lifetime, pages in enumerate(target.pages)
        ),
    )


def refused(me: Peer, ticket: Ticket, reason: str) -> Refused:
    """Return the refusal of a ticket: nothing more is written for it."""
    return Refused(
        room=ticket.room,
        generation=ticket.generation,
        prefill=me,
        decode_incarnation=ticket.decode.incarnation,
        reason=reason,
    )


def drained(me: Peer, asked: Revoke | Ticket) -> Drained:
    """Return the end of a ticket of this room and generation: nothing more is written for it."""
    return Drained(
        room=asked.room,
        generation=asked.generation,
        prefill=me,
        decode_incarnation=asked.decode.incarnation,
    )
