"""Driver loop, which passes events to `reconcile` and executes the actions in threads."""

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count

from cluster.launch.launcher import Launcher
from cluster.spec.errors import BatonError, PeerUnreachableError
from cluster.spec.ids import Incarnation, ReplicaId
from cluster.supervisor import events
from cluster.supervisor.commands import OperatorCommand
from cluster.supervisor.events import Action, CommandAnswer, Event, Outcome
from cluster.supervisor.reconcile import reconcile
from cluster.supervisor.state import Cluster, ClusterPhase, Member, Now

_RETRY_S = 1.0
_PROVE_S = 30.0
"""Interval between checks of whether the processes of an ended incarnation are dead."""


class Supervisor:
    """Driver loop that keeps the members of one cluster running until it is stopped."""

    def __init__(
        self,
        backoff_s: float,
        announce: Callable[[], None],
        report: Callable[[str], None],
        patience_s: float = math.inf,
    ) -> None:
        """Prepare without starting anything.

        Args:
            announce: called once when the cluster is up, in a separate thread.
            report: prints one line for the user.
            patience_s: maximum time for which the rank table may show a member as silent.
        """
        self._cluster = Cluster(members={}, backoff_s=backoff_s, patience_s=patience_s)
        self._announce = announce
        self._report = report
        self.is_urgent = False
        """True if the operator has asked for an immediate stop."""
        # A SimpleQueue may be filled from a signal handler.
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._answers: dict[int, queue.SimpleQueue[CommandAnswer]] = {}
        self._command_numbers = count()

    def post(self, event: Event) -> None:
        """Queue an event. Safe in any thread and in signal handlers."""
        self._events.put(event)

    def run(self, launcher: Launcher) -> None:
        """Start all members and keep them running until the cluster has stopped.

        Raises:
            Exception: a member failed during the first start, usually with a BatonError.
        """
        self._cluster = replace(self._cluster, members={name: Member(name=name) for name in launcher.names})
        self._handle(events.Tick(), launcher)
        while self._cluster.phase is not ClusterPhase.STOPPED:
            self._handle(self._next_event(), launcher)
        if self._cluster.failure is not None:
            raise self._cluster.failure

    def request_stop(self, reason: str) -> None:
        """Drain and stop; on the second call, stop immediately. Safe in any thread and in signal handlers."""
        self.post(events.StopRequested(reason))

    def give(self, command: OperatorCommand) -> Iterator[CommandAnswer]:
        """Carry out an operator's command and yield its answers as they arrive. Safe in any thread.

        The command continues even if its answers are no longer read.
        """
        number = next(self._command_numbers)
        answers = self._answers[number] = queue.SimpleQueue[CommandAnswer]()
        try:
            self.post(events.CommandReceived(number, command))
            while (answer := answers.get()).outcome is Outcome.GOING_ON:
                yield answer
            yield answer
        finally:
            del self._answers[number]

    def _next_event(self) -> Event:
        wake_s = self._cluster.next_wake_s()
        try:
            return self._events.get(timeout=None if wake_s is None else max(0.0, wake_s - time.monotonic()))
        except queue.Empty:
            return events.Tick()

    def _handle(self, event: Event, launcher: Launcher) -> None:
        now = Now(s=time.monotonic(), unix_ms=time.time_ns() // 1_000_000)
        self._cluster, actions = reconcile(self._cluster, event, now)
        for action in actions:
            self.is_urgent |= isinstance(action, events.Kill)
            if isinstance(action, events.Report):
                self._report(action.line)
            elif isinstance(action, events.CommandAnswer):
                if answers := self._answers.get(action.number):
                    answers.put(action)
            else:
                name = type(action).__name__.lower()
                threading.Thread(target=self._do, args=(action, launcher), name=name, daemon=True).start()

    def _do(self, action: Action, launcher: Launcher) -> None:
        try:
            answer = self._carry_out(action, launcher)
        except Exception as error:  # the supervisor must learn that the action has ended
            answer = _answer_to_failure(action, error)
            if not isinstance(action, events.Start | events.Place | events.Examine):
                self._report(f"{type(action).__name__}: {_describe(error)}")
        if answer is not None:
            self.post(answer)

    def _carry_out(self, action: Action, launcher: Launcher) -> Event | None:
        match action:
            case events.Start(name, incarnation):
                launcher.start(name, incarnation)
                return events.Started(name, incarnation)
            case events.End(name, incarnation):
                return events.Ended(name, incarnation, launcher.end(name, incarnation))
            case events.Examine(name, incarnation):
                return events.Examined(name, incarnation, launcher.lives(name))
            case events.Prove(name, incarnation):
                return self._prove(name, incarnation, launcher)
            case events.MarkEnded(name, incarnation, proven):
                self._mark_ended(ReplicaId(name), incarnation, proven, launcher)
            case events.Announce():
                self._announce()
            case events.Place(names, wait_s):
                launcher.place(names, wait_s)
                return events.Placed(None)
            case events.DrainReplica(name, incarnation, grace_s):
                return events.ReplicaDrained(name, incarnation, launcher.drain_replica(name, grace_s))
            case events.ResumeReplica(name, incarnation):
                return events.ReplicaResumed(name, incarnation, launcher.resume_replica(name))
            case events.DrainCluster():
                return events.ClusterDrained(launcher.drain())
            case events.Stop():
                launcher.stop()
                return events.Stopped()
            case events.Kill():
                launcher.kill()
                return events.Stopped()
            case events.Report() | events.CommandAnswer():
                raise AssertionError("must be handled in the supervisor's own thread")
        return None

    def _prove(self, name: str, incarnation: Incarnation, launcher: Launcher) -> Event | None:
        while self._cluster.phase is ClusterPhase.SERVING:
            time.sleep(_PROVE_S)
            try:
                if launcher.prove(name, incarnation):
                    return events.Proven(name, incarnation)
            except Exception as error:  # the pages of this incarnation stay reserved until the proof succeeds
                self._report(f"{name}: no proof that incarnation {incarnation} is gone: {_describe(error)}")
        return None

    def _mark_ended(self, replica: ReplicaId, incarnation: Incarnation, proven: bool, launcher: Launcher) -> None:
        while self._cluster.phase is ClusterPhase.SERVING:
            try:
                launcher.mark_ended(replica, incarnation, proven=proven)
                return
            except PeerUnreachableError:
                time.sleep(_RETRY_S)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _answer_to_failure(action: Action, error: Exception) -> Event | None:
    match action:
        case events.Start(name, incarnation):
            return events.Failed(name, incarnation, error)
        case events.End(name, incarnation):
            return events.Ended(name, incarnation, False)
        case events.Examine(name, incarnation):
            return events.Examined(name, incarnation, None)
        case events.Place():
            return events.Placed(error if isinstance(error, BatonError) else BatonError(_describe(error)))
        case events.DrainReplica(name, incarnation):
            return events.ReplicaDrained(name, incarnation, False)
        case events.ResumeReplica(name, incarnation):
            return events.ReplicaResumed(name, incarnation, False)
        case events.DrainCluster():
            return events.ClusterDrained(False)
        case events.Stop() | events.Kill():
            return events.Stopped()
        case _:
            return None
