"""Liveness check of the router for the driver: a process that hangs keeps its port, and its clients wait."""

import time
from collections.abc import Callable

import httpx


def follow_router(url: Callable[[], str], on_seen: Callable[[bool], None], timeout_s: float, interval_s: float) -> None:
    """Report whether a router process responds, at every change and repeatedly while it does not; never returns.

    Any response in time counts. The connection stays open, so that the driver does not queue behind a crowd of clients.
    """
    answered: bool | None = None
    with httpx.Client(timeout=timeout_s, trust_env=False) as http:
        while True:
            before, answered = answered, _answers(http, url())
            if not (before and answered):
                on_seen(answered)
            time.sleep(interval_s)


def _answers(http: httpx.Client, url: str) -> bool:
    try:
        http.get(f"{url}/health")
    except httpx.TransportError:
        return False
    return True
