"""Looks for signs of life of the router, for the driver: one that stands still keeps its port, and its clients wait."""

import time
from collections.abc import Callable, Mapping

import httpx


def follow_router(url: str, on_seen: Callable[[bool], None], timeout_s: float, interval_s: float) -> None:
    """Tell whether the router answers, at every change and for as long as it does not; for ever.

    Any answer in time is one. The connection stays open, so that no crowd of clients is before the driver.
    """
    answered: bool | None = None
    with httpx.Client(base_url=url, timeout=timeout_s, trust_env=False) as http:
        while True:
            before, answered = answered, _answers(http)
            if not (before and answered):
                on_seen(answered)
            time.sleep(interval_s)


def follow_routers(
    beats: Callable[[], Mapping[str, int]], on_seen: Callable[[bool, str], None], interval_s: float
) -> None:
    """The same of several processes, by what they write on their board all the time; for ever."""
    before: Mapping[str, int] = {}
    while True:
        now = beats()
        for name, beat in now.items():
            on_seen(beat != before.get(name), name)
        before = now
        time.sleep(interval_s)


def _answers(http: httpx.Client) -> bool:
    try:
        http.get("/health")
    except httpx.TransportError:
        return False
    return True
