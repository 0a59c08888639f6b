"""Quarantine: pages of abandoned requests that somebody may still write to, and their limit. Pure."""

import math
from collections.abc import Iterable, Sequence

from workers.cache.page_lists import live_pages
from workers.scheduler.decode_request import DecodeRequest, DecodeState
from workers.scheduler.steps import StepScheduler


def stopping(requests: Iterable[DecodeRequest], since_s: float = math.inf) -> list[DecodeRequest]:
    """Return requests that were given up at that time or before."""
    return [
        request for request in requests if request.state is DecodeState.STOPPING and request.stopping_since_s <= since_s
    ]


def count_pages(requests: Iterable[DecodeRequest]) -> int:
    """Count the pages of these requests."""
    return sum(len(live_pages(request.new_pages)) for request in requests)


def all_wait(requests: Iterable[DecodeRequest], steps: StepScheduler) -> bool:
    """Return whether none of these has pages, or can have any now."""
    waiting = {DecodeState.QUEUED} if steps.num_running else {DecodeState.QUEUED, DecodeState.RUNNING}
    return all(request.state in waiting for request in requests) and not steps.has_work()


def describe(requests: Sequence[DecodeRequest], num_pages: int, limit: float) -> str:
    """Describe why a replica ends because of these requests: beyond the limit, or blocking all others."""
    is_beyond = count_pages(requests) > limit * num_pages
    reason = f"more than {limit:g} of them" if is_beyond else "which a request waits for"
    names = ", ".join(sorted({request.session.prefill.replica for request in requests if request.session}))
    return (
        f"{count_pages(requests)} of {num_pages} pages are in quarantine, {reason}: "
        f"{names} did not confirm that it will write no more"
    )
