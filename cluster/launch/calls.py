"""Waiting for calls in several processes at once, with errors that name the process."""

import time
from collections.abc import Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, TypeVar

from cluster.spec.errors import BatonError, PeerLostError, UserError

LAST_WORDS_S = 3.0
"""Delay between the end of a worker, which its peers notice at once, and its error."""

Answer = TypeVar("Answer")


class Deadline:
    """Point in time that several waits share."""

    def __init__(self, timeout_s: float, key: str = "resources.start_timeout_s") -> None:
        """Start a deadline; ``key`` is the configuration key that sets it."""
        self._timeout_s = timeout_s
        self._key = key
        self._end_s = time.monotonic() + timeout_s

    def left_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._end_s - time.monotonic())

    def missed(self, what: str) -> BatonError:
        """Return the error of a wait that ran into this deadline."""
        return BatonError(f"{what} after {self._timeout_s:g} s ({self._key})")


def gather(calls: "Mapping[str, Future[Answer]]", deadline: Deadline) -> list[Answer]:
    """Return the results of all calls, in order; raises the first error at once.

    Args:
        calls: futures by the name of the called process, which the error shows.

    Raises:
        UserError: one of the calls raised one.
        BatonError: any other error, or the deadline has passed.
    """
    wait(calls.values(), deadline.left_s(), FIRST_EXCEPTION)
    raise_failure(calls, deadline)
    if late := [who for who, call in calls.items() if not call.done()]:
        raise deadline.missed(f"{', '.join(late)}: not ready")
    return [call.result() for call in calls.values()]


def raise_failure(calls: "Mapping[str, Future[Any]]", deadline: Deadline) -> None:
    """Raise ``blame`` of the failed calls; returns if none has failed."""
    failed = _failed(calls)
    if not failed:
        return
    if all(isinstance(error, PeerLostError) for error in failed.values()):
        # The process that ended first may not have reported its error yet.
        wait(calls.values(), min(deadline.left_s(), LAST_WORDS_S))
    raise blame(_failed(calls))


def blame(failed: Mapping[str, BaseException]) -> BatonError:
    """Combine several errors into one: an error the user can fix first, else the first that is not a mere
    consequence.
    """
    who, error = min(
        failed.items(), key=lambda item: (not isinstance(item[1], UserError), isinstance(item[1], PeerLostError))
    )
    return labelled(who, error)


def _failed(calls: "Mapping[str, Future[Any]]") -> dict[str, BaseException]:
    return {who: error for who, call in calls.items() if call.done() and (error := call.exception())}


def labelled(who: str, error: BaseException) -> BatonError:
    """Return the error labelled with its process; a UserError stays one."""
    if isinstance(error, UserError):
        named: BatonError = UserError(f"{who}: {error}")
    else:
        kind = "" if isinstance(error, BatonError) else f"{type(error).__name__}: "
        named = BatonError(f"{who}: {kind}{error}")
    named.__cause__ = error
    return named
