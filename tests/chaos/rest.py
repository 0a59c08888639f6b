"""Waiting for a cluster in which nobody asks for anything any more."""

from collections.abc import Callable
from contextlib import suppress

import httpx

from tests.fakes.cluster import RunningCluster

REST_S = 180.0


def settle(cluster: RunningCluster) -> None:
    """Wait until nothing is held any more, but not for ever: what is held then has leaked."""
    with suppress(AssertionError):
        cluster.wait_until(if_answered(cluster.is_empty), REST_S)


def if_answered(condition: Callable[[], bool]) -> Callable[[], bool]:
    """The same, and False while the router does not answer."""

    def is_so() -> bool:
        try:
            return condition()
        except httpx.HTTPError:
            return False

    return is_so
