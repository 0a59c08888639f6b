"""Driver's loop: passes events to `reconcile` and its actions to threads. Sleeps until something happens."""

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count

from cluster.launch.launcher import Launcher
from cluster.spec.errors import BatonError, PeerUnreachableError
from cluster.spec.ids import ROUTER, Incarnation, ReplicaId
from cluster.supervisor import events as words
from cluster.supervisor.commands import Command
from cluster.supervisor.events import Action, Answer, Event, Outcome
from cluster.supervisor.reconcile import reconcile
from cluster.supervisor.state import Cluster, Member, Now, Phase

_RETRY_S = 1.0
_PROVE_S = 30.0
"""Interval between checks of a machine that could not prove its processes gone."""


class Supervisor:
    """Keeps the members of one cluster running until a stop is requested."""

    def __init__(
        self,
        backoff_s: float,
        announce: Callable[[], None],
        report: Callable[[str], None],
        patience_s: float = math.inf,
    ) -> None:
        """Prepare; nothing starts yet.

        Args:
            announce: called once, in a thread of its own, when the cluster is up.
            report: prints lines for the user.
            patience_s: maximum silence of a member, from when the rank table shows it.
        """
        self._cluster = Cluster(members={}, backoff_s=backoff_s, patience_s=patience_s)
        self._announce = announce
        self._report = report
        self._is_urgent = False
        # A SimpleQueue may be filled from a signal handler.
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._answers: dict[int, queue.SimpleQueue[Answer]] = {}
        self._command_numbers = count()

    @property
    def is_urgent(self) -> bool:
        return self._is_urgent

    def post(self, event: Event) -> None:
        """Queue an event; from any thread, and from signal handlers."""
        self._events.put(event)

    def run(self, launcher: Launcher) -> None:
        """Start everything, and keep it running until a stop is requested and done.

        Raises:
            Exception: the failure of the first start, usually a BatonError.
        """
        self._cluster = replace(self._cluster, members={name: Member(name=name) for name in launcher.names})
        self._handle(words.Tick(), launcher)
        while self._cluster.phase is not Phase.STOPPED:
            self._handle(self._next_event(), launcher)
        if self._cluster.failure is not None:
            raise self._cluster.failure

    def failed(self, name: str, incarnation: Incarnation, error: BaseException) -> None:
        """Report that one process of a member has ended; from any thread."""
        self.post(words.Failed(name, incarnation, error))

    def request_stop(self, reason: str) -> None:
        """Drain and stop; the second time, stop at once. Safe in any thread and in signal handlers."""
        self.post(words.StopRequested(reason))

    def saw_router(self, answers: bool, name: str = ROUTER) -> None:
        """Report the result of a liveness check of a router process; from any thread."""
        self.post(words.RouterSeen(answers, name))

    def give(self, command: Command) -> Iterator[Answer]:
        """Carry out an operator's command; yields its responses as they arrive, up to the last one. From any thread.

        The command continues when its responses are no longer read.
        """
        number = next(self._command_numbers)
        answers = self._answers[number] = queue.SimpleQueue[Answer]()
        try:
            self.post(words.CommandReceived(number, command))
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
            return words.Tick()

    def _handle(self, event: Event, launcher: Launcher) -> None:
        now = Now(s=time.monotonic(), unix_ms=time.time_ns() // 1_000_000)
        self._cluster, actions = reconcile(self._cluster, event, now)
        for action in actions:
            self._is_urgent |= isinstance(action, words.Kill)
            if isinstance(action, words.Report):
                self._report(action.line)
            elif isinstance(action, words.Answer):
                if answers := self._answers.get(action.number):
                    answers.put(action)
            else:
                name = type(action).__name__.lower()
                threading.Thread(target=self._do, args=(action, launcher), name=name, daemon=True).start()

    def _do(self, action: Action, launcher: Launcher) -> None:
        try:
            answer = self._carry_out(action, launcher)
        except Exception as error:  # whatever it is, the supervisor must learn that the action is over
            answer = _answer_to_failure(action, error)
            if not isinstance(action, words.Start | words.Place):
                self._report(f"{type(action).__name__}: {_told(error)}")
        if answer is not None:
            self.post(answer)

    def _carry_out(self, action: Action, launcher: Launcher) -> Event | None:
        match action:
            case words.Start(name, incarnation):
                launcher.start(name, incarnation)
                return words.Started(name, incarnation)
            case words.End(name, incarnation):
                return words.Ended(name, incarnation, launcher.end(name, incarnation))
            case words.Prove(name, incarnation):
                return self._prove(name, incarnation, launcher)
            case words.MarkEnded(name, incarnation, proven):
                self._mark_ended(ReplicaId(name), incarnation, proven, launcher)
            case words.Announce():
                self._announce()
            case words.Place(names):
                launcher.place(names)
                return words.Placed(None)
            case words.DrainReplica(name, incarnation, grace_s):
                return words.ReplicaDrained(name, incarnation, launcher.drain_replica(name, grace_s))
            case words.ResumeReplica(name, incarnation):
                return words.ReplicaResumed(name, incarnation, launcher.resume_replica(name))
            case words.Drain():
                return words.Drained(launcher.drain())
            case words.Stop():
                launcher.stop()
                return words.Stopped()
            case words.Kill():
                launcher.kill()
                return words.Stopped()
            case words.Report() | words.Answer():
                raise AssertionError("told on the supervisor's own thread")
        return None

    def _prove(self, name: str, incarnation: Incarnation, launcher: Launcher) -> Event | None:
        while self._cluster.phase is Phase.SERVING:
            time.sleep(_PROVE_S)
            try:
                if launcher.prove(name, incarnation):
                    return words.Proven(name, incarnation)
            except Exception as error:  # whatever it is, the pages of this start wait for its proof
                self._report(f"{name}: no proof that incarnation {incarnation} is gone: {_told(error)}")
        return None

    def _mark_ended(self, replica: ReplicaId, incarnation: Incarnation, proven: bool, launcher: Launcher) -> None:
        """Report the end until the table has it; a table that restarts gets it again."""
        while self._cluster.phase is Phase.SERVING:
            try:
                launcher.mark_ended(replica, incarnation, proven=proven)
                return
            except PeerUnreachableError:
                time.sleep(_RETRY_S)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _answer_to_failure(action: Action, error: Exception) -> Event | None:
    match action:
        case words.Start(name, incarnation):
            return words.Failed(name, incarnation, error)
        case words.End(name, incarnation):
            return words.Ended(name, incarnation, False)
        case words.Place():
            return words.Placed(error if isinstance(error, BatonError) else BatonError(_told(error)))
        case words.DrainReplica(name, incarnation):
            return words.ReplicaDrained(name, incarnation, False)
        case words.ResumeReplica(name, incarnation):
            return words.ReplicaResumed(name, incarnation, False)
        case words.Drain():
            return words.Drained(False)
        case words.Stop() | words.Kill():
            return words.Stopped()
        case _:
            return None
