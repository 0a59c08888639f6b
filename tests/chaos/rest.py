"""Wait for an idle cluster."""

from collections.abc import Callable
from contextlib import suppress

import httpx

from tests.fakes.cluster import RunningCluster

REST_S = 180.0


def settle(cluster: RunningCluster) -> None:
    """Wait until nothing is in use, for a limited time. What remains then has leaked."""
    with suppress(AssertionError):
        cluster.wait_until(if_answered(cluster.is_empty), REST_S)


def if_answered(condition: Callable[[], bool]) -> Callable[[], bool]:
    """Return the condition, which is false while the router does not answer."""

    def is_so() -> bool:
        try:
            return condition()
        except httpx.HTTPError:
            return False

    return is_so
