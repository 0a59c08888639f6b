"""Waits for calls in several processes, for machines to join, and for replicas to drain."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from cluster.actors import ActorSystem, Demand, Machine
from cluster.bootstrap.client import follow_table
from cluster.launch.tools import Table
from cluster.placement import demand_of, place
from cluster.spec.clock import HEARTBEAT_S
from cluster.spec.config import DeployConfig
from cluster.spec.errors import BatonError, ConfigError, PeerLostError, UserError
from cluster.spec.ids import Incarnation, ReplicaId
from cluster.spec.registry import TableSnapshot

LAST_WORDS_S = 3.0
"""Maximum time from when peers notice that a worker has ended until that worker's own error arrives."""

Returned = TypeVar("Returned")
POLL_S = 1.0
QUIET_HEARTBEATS = 2.5
"""Heartbeat intervals without requests after which a replica counts as drained: enough for two heartbeats."""
RESEND_S = 2.0
"""Interval at which an unacknowledged message to a replica is repeated."""


class Deadline:
    """Point in time that several waits share."""

    def __init__(self, timeout_s: float, limit: str = "resources.start_timeout_s") -> None:
        """Start the timeout; ``limit`` names it in the error."""
        self._timeout_s = timeout_s
        self._limit = limit
        self._end_s = time.monotonic() + timeout_s

    def left_s(self) -> float:
        return max(0.0, self._end_s - time.monotonic())

    def missed(self, what: str) -> BatonError:
        """Return the error of a wait that missed this deadline."""
        return BatonError(f"{what} after {self._timeout_s:g} s ({self._limit})")


def gather(calls: "Mapping[str, Future[Returned]]", deadline: Deadline) -> list[Returned]:
    """Return the results of all calls in order, or raise at the first error.

    Args:
        calls: futures by process name, which appears in the error.

    Raises:
        UserError: a call raised a UserError.
        BatonError: a call raised another error, or the deadline has passed.
    """
    wait(calls.values(), deadline.left_s(), FIRST_EXCEPTION)
    raise_failure(calls, deadline)
    if late := [who for who, call in calls.items() if not call.done()]:
        raise deadline.missed(f"{', '.join(late)}: not ready")
    return [call.result() for call in calls.values()]


def raise_failure(calls: "Mapping[str, Future[Any]]", deadline: Deadline) -> None:
    """Raise the error that explains the failed calls best, if there are any."""
    failed = _failed(calls)
    if not failed:
        return
    if all(isinstance(error, PeerLostError) for error in failed.values()):
        # The process that ended first may not have reported its error yet.
        wait(calls.values(), min(deadline.left_s(), LAST_WORDS_S))
    raise blame(_failed(calls))


def blame(failed: Mapping[str, BaseException]) -> BatonError:
    """Return the error to show: preferably one that the user can fix, otherwise one that no other error has caused."""
    who, error = min(
        failed.items(), key=lambda item: (not isinstance(item[1], UserError), isinstance(item[1], PeerLostError))
    )
    return labelled(who, error)


def _failed(calls: "Mapping[str, Future[Any]]") -> dict[str, BaseException]:
    return {who: error for who, call in calls.items() if call.done() and (error := call.exception())}


def labelled(who: str, error: BaseException) -> BatonError:
    """Return the error prefixed with its process's name; a UserError stays a UserError."""
    if isinstance(error, UserError):
        named: BatonError = UserError(f"{who}: {error}")
    else:
        kind = "" if isinstance(error, BatonError) else f"{type(error).__name__}: "
        named = BatonError(f"{who}: {kind}{error}")
    named.__cause__ = error
    return named


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Capacity for replicas on machines."""

    config: DeployConfig
    machines: Callable[[], Sequence[Machine]]
    """Function that returns the machines that can be used now."""
    only: Sequence[ReplicaId] | None = None
    """Replicas to place; None for all replicas of the configuration."""

    def check(self) -> None:
        """Raise ConfigError if the replicas do not fit."""
        place(self.config, self.machines(), self.only)

    @property
    def demand(self) -> Demand:
        return demand_of(self.config, self.only)


def await_capacity(
    system: ActorSystem, capacity: Capacity, timeout_s: float, say: Callable[[str], None], check: Callable[[], None]
) -> None:
    """Wait until replicas fit, and let the autoscaler know what they need.

    Args:
        system: the cluster to place the replicas on.
        capacity: the capacity to wait for.
        timeout_s: maximum wait in seconds.
        say: called once with the missing resources, unless the replicas fit at once.
        check: called every second; an exception ends the wait.

    Raises:
        ConfigError: the replicas still do not fit after the timeout.
    """
    deadline = Deadline(timeout_s)
    try:
        capacity.check()
        return
    except ConfigError as error:
        say(f"waiting at most {timeout_s:g} s for machines: {error}")
    with system.wanting(f"{capacity.config.name}-capacity", capacity.demand) as is_there:
        while deadline.left_s() and not is_there(min(POLL_S, deadline.left_s())):
            check()
    while True:  # the resources held for the demand take a moment to become free
        check()
        try:
            capacity.check()
            return
        except ConfigError:
            if not deadline.left_s():
                raise
        time.sleep(min(POLL_S, deadline.left_s()))


class DrainWatch:
    """Drain state of one incarnation of a replica. Does no I/O.

    One report without open requests is not enough: a router may have sent a request before it knew of the drain, or a
    short request may have finished between two heartbeats while its last tokens are still in flight.
    """

    def __init__(self, replica: ReplicaId, incarnation: Incarnation) -> None:
        self._replica = replica
        self._incarnation = incarnation
        self._since_s = 0.0
        self._num_taken: int | None = None
        """Number of requests accepted so far, from the latest heartbeat; None if it showed open requests."""

    def saw(self, snapshot: TableSnapshot | None, now_s: float) -> None:
        """Record a new table; None means that the service is unavailable."""
        num_taken = None if snapshot is None else self._taken_if_empty(snapshot)
        if num_taken != self._num_taken:
            self._num_taken, self._since_s = num_taken, now_s

    def is_over(self, now_s: float) -> bool:
        """Return whether the replica has been idle for long enough."""
        return self._num_taken is not None and now_s - self._since_s >= QUIET_HEARTBEATS * HEARTBEAT_S

    def _taken_if_empty(self, snapshot: TableSnapshot) -> int | None:
        entry = snapshot.find(self._replica)
        if entry is None or entry.incarnation != self._incarnation:
            return None
        load = entry.load
        is_storing = load.tiers is not None and load.tiers.is_storing
        is_empty = load.draining and load.num_waiting == load.num_running == 0 and not is_storing
        return load.num_taken if is_empty else None


def send_until(
    table: Table, is_shown: Callable[[TableSnapshot], bool], send: Callable[[], None], deadline: Deadline
) -> bool:
    """Repeat a message until the table shows its effect; return False at the deadline."""
    send()
    again = Deadline(RESEND_S)
    for snapshot in follow_table(table.watch, lambda: min(deadline.left_s(), RESEND_S)):
        if snapshot is not None and is_shown(snapshot):
            return True
        if not deadline.left_s():
            break
        if not again.left_s():
            send()
            again = Deadline(RESEND_S)
    return False


def wait_drained(table: Table, watch: DrainWatch, deadline: Deadline) -> bool:
    """Wait until the replica is drained; return False at the deadline."""

    def on_lost() -> None:
        watch.saw(None, time.monotonic())

    for snapshot in follow_table(table.watch, lambda: min(deadline.left_s(), HEARTBEAT_S), on_lost):
        if snapshot is not None:
            watch.saw(snapshot, time.monotonic())
        if watch.is_over(time.monotonic()):
            return True
        if not deadline.left_s():
            break
    return False
