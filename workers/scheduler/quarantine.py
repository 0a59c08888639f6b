"""Pages of requests that were given up, to which somebody may still write: how many are too many. Pure."""

import math
from collections.abc import Iterable, Sequence

from workers.scheduler.decode_request import DecodeRequest, DecodeState


def stopping(requests: Iterable[DecodeRequest], since_s: float = math.inf) -> list[DecodeRequest]:
    """Those that were given up, at that time or before."""
    return [
        request for request in requests if request.state is DecodeState.STOPPING and request.stopping_since_s <= since_s
    ]


def count_pages(requests: Iterable[DecodeRequest]) -> int:
    """Pages that they keep from others."""
    return sum(len(request.pages) - request.num_held for request in requests)


def describe(requests: Sequence[DecodeRequest], num_pages: int, limit: float) -> str:
    """Why a replica with a pool of ``num_pages`` ends because of them."""
    names = ", ".join(sorted({request.session.prefill.replica for request in requests if request.session}))
    return (
        f"{count_pages(requests)} of {num_pages} pages are in quarantine, more than {limit:g} of them "
        f"(transfer.quarantine_limit): {names} did not say that it writes no more"
    )
