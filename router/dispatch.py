"""The life of every open request, sans I/O: events in, actions out; ``router.relay`` is the loop around it.

1. ``open`` draws a room and sends the same Submit to the prefill and the decode leader of a pair: an attempt.
2. Outputs of the decode leader become tokens for the client; the first one means that prefill is done.
3. An attempt that fails is followed by another one, in a room of its own, on other replicas where there are any. It
   carries the tokens that the client has, and goes on behind them.
4. The last Output, too many failures, a client that left or the deadline ends the request. Whatever the cause, no
   leg that may still work goes without a Cancel, and nothing of the request is kept.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.spec.config import RouterConfig
from cluster.spec.ids import Room, draw_room
from cluster.spec.lifecycle import move
from cluster.spec.messages import Blame, Failure, Inquire, Output
from cluster.spec.peer import Peer
from cluster.spec.tiers import CachedTokens
from router.actions import Action, Cause, Emit, Fail, Wait
from router.attempts import Attempts
from router.breaker import Breakers
from router.flight import ENDS, MOVES, Ask, Flight, Pick, Stage
from router.inquiries import Inquiries
from router.load import LoadBook


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trouble:
    """Why an attempt came to nothing."""

    cause: Cause
    reason: str
    blamed: Sequence[Peer]
    """Those that may fail again."""
    cancelled: Sequence[Peer]
    """Those that may still work for it."""


class Dispatch:
    """All open requests of one router. The room of its first attempt is a request's name."""

    def __init__(
        self,
        me: Peer,
        config: RouterConfig,
        load: LoadBook,
        breakers: Breakers,
        pick: Pick,
        draw: Callable[[], Room] = draw_room,
    ) -> None:
        """Keeps ``load`` and ``breakers`` up to date, which ``pick`` may look at."""
        self.me = me
        self.load = load
        self.breakers = breakers
        self._config = config
        self._draw = draw
        self._flights: dict[Room, Flight] = {}
        self._attempts = Attempts(me, load, breakers, pick)
        self._inquiries = Inquiries(me, self._attempts)
        self.dropped: Counter[str] = Counter()
        """Messages that were not used: of a ``late`` room, from a ``foreign`` sender, ``duplicate``."""
        self.ended: Counter[Stage] = Counter()
        """Requests by how they ended."""
        self.num_retries = 0
        """Attempts that began a request anew."""
        self.num_continuations = 0
        """Attempts that went on behind tokens which the client had."""

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._flights)

    @property
    def next_deadline_s(self) -> float | None:
        """When ``expire`` may next find something."""
        if not self._flights:
            return None
        return min(self._inquiries.due_s, min(flight.wake_at_s for flight in self._flights.values()))

    def is_open(self, room: Room) -> bool:
        """Whether the request of this name has not ended."""
        return room in self._flights

    def is_under_way(self, room: Room) -> bool:
        """Whether this is the room of an attempt that is not over."""
        return room in self._attempts

    def open(
        self, ask: Ask, deadline_s: float, now_s: float, prompt_of: Room | None = None
    ) -> tuple[Room, list[Action]]:
        """Start a request: its name, and what is to be done.

        Args:
            prompt_of: name of another choice, which brings the prompt to the decode replica of both.
        """
        room = self._draw()
        assert room not in self._flights, f"room {room} drawn twice"
        flight = self._flights[room] = Flight(room=room, ask=ask, deadline_s=deadline_s)
        first = self._flights.get(prompt_of) if prompt_of is not None else None
        return room, self._begin(flight, room, now_s, first)

    def on_output(self, output: Output, now_s: float) -> list[Action]:
        """Tokens arrived."""
        flight = self._attempts.find(output.room)
        if flight is None:
            return self._drop("late")
        if not flight.is_decode(output.replica, output.incarnation):
            return self._drop("foreign")
        flight.heard_s = now_s
        if problem := flight.problem(output):
            return self._on_broken(flight, f"{output.replica}: {problem}", now_s)
        num_known = len(flight.given) - output.first_index
        token_ids, logprobs = output.token_ids[num_known:], output.logprobs[num_known:]
        if not token_ids and output.finish is None:
            return self._drop("duplicate")
        is_beginning = not flight.given
        if flight.stage is Stage.WAITING:
            self._attempts.prefill_done(flight)
            self._move(flight, Stage.STREAMING, "first output")
        flight.given += token_ids
        if output.finish is not None:
            self._attempts.decode_done(flight)
            self._end(flight, Stage.FINISHED, "last output", [])
        return [
            Emit(
                room=flight.room,
                token_ids=token_ids,
                finish=output.finish,
                logprobs=logprobs,
                prompt_logprobs=output.prompt_logprobs if is_beginning else [],
                cached=output.cached if is_beginning else CachedTokens(),
                phases=output.phases if is_beginning else None,
            )
        ]

    def on_failure(self, failure: Failure, now_s: float) -> list[Action]:
        """A leg gave up; the other one is cancelled at once."""
        flight = self._attempts.find(failure.room)
        if flight is None:
            return self._drop("late")
        failed = flight.leg(failure.replica, failure.incarnation)
        if failed is None:
            return self._drop("foreign")
        if failed not in flight.awaited:
            return self._drop("late")
        reason = f"{failure.replica}: {failure.reason}"
        others = [leg for leg in flight.legs if leg is not failed]
        if not failure.retryable:
            return self._fail(flight, Cause.REFUSED, reason, others)
        blamed = {Blame.SENDER: [failed], Blame.BOTH: flight.legs, Blame.NEITHER: []}[failure.blame]
        trouble = _Trouble(cause=Cause.REPLICA_FAILED, reason=reason, blamed=blamed, cancelled=others)
        return self._go_on(flight, trouble, now_s)

    def on_lost(self, peer: Peer, now_s: float) -> list[Action]:
        """A replica is gone. It gets its Cancels all the same: perhaps only the way to the table is broken."""
        actions: list[Action] = []
        for flight in list(self._flights.values()):
            if peer in flight.awaited:
                reason = f"{peer.replica} was lost before the answer was whole"
                trouble = _Trouble(cause=Cause.REPLICA_LOST, reason=reason, blamed=[peer], cancelled=flight.legs)
                actions += self._go_on(flight, trouble, now_s)
        self._attempts.forget(peer)
        return actions

    def on_unreachable(self, room: Room, address: str, reason: str, now_s: float) -> list[Action]:
        """The Submit of an attempt could not be handed over."""
        flight = self._attempts.find(room)
        if flight is None:
            return []
        blamed = [leg for leg in flight.legs if leg.address == address]
        trouble = _Trouble(cause=Cause.REPLICA_LOST, reason=reason, blamed=blamed, cancelled=flight.legs)
        return self._go_on(flight, trouble, now_s)

    def on_inquire(self, inquire: Inquire) -> list[Action]:
        """A leader does not hear of the end of what it works for."""
        if inquire.incarnation != self.me.incarnation:
            return self._drop("foreign")
        return self._inquiries.answer(inquire)

    def on_client_left(self, room: Room) -> list[Action]:
        """Nobody reads the answer any more."""
        flight = self._flights[room]
        return self._end(flight, Stage.CANCELLED, "client left", flight.legs)

    def on_slow_reader(self, room: Room, reason: str) -> list[Action]:
        """The client reads more slowly than may be kept for it."""
        flight = self._flights[room]
        return self._fail(flight, Cause.SLOW_READER, reason, flight.legs)

    def on_enough(self, room: Room) -> list[Action]:
        """A stop string completed the answer before the model ended it."""
        flight = self._flights[room]
        if flight.attempt is not None:
            self._attempts.decode_done(flight)
        return self._end(flight, Stage.FINISHED, "stop string", flight.legs)

    def expire(self, now_s: float) -> list[Action]:
        """Fail the requests whose deadline has passed, make the attempts that are due, ask about the silent ones."""
        actions: list[Action] = []
        for flight in [flight for flight in self._flights.values() if flight.wake_at_s <= now_s]:
            if flight.deadline_s <= now_s:
                reason = f"not finished before its deadline (router.request_timeout_s): {flight.awaits}"
                actions += self._fail(flight, Cause.TIMED_OUT, reason, flight.legs)
            else:
                actions += self._begin(flight, self._draw(), now_s)
        return actions + self._inquiries.ask(now_s)

    def stop(self) -> list[Action]:
        """Fail everything that is open."""
        return [
            action
            for flight in list(self._flights.values())
            for action in self._fail(flight, Cause.STOPPED, "the router stops", flight.legs)
        ]

    def check_integrity(self) -> None:
        """Every open request is in an open stage, and has an attempt unless it waits for one."""
        for room, flight in self._flights.items():
            assert room == flight.room, f"room {flight.room} is filed under {room}"
            assert flight.stage not in ENDS, f"room {room} is {flight.stage.name} and still open"
            assert (flight.attempt is None) == (flight.stage is Stage.BETWEEN), f"room {room}: {flight.stage.name}"
        self._attempts.check_integrity(self._flights.values())

    def _begin(self, flight: Flight, room: Room, now_s: float, prompt_of: Flight | None = None) -> list[Action]:
        """Make an attempt; the end of the request if there is no replica for it."""
        actions = self._attempts.begin(flight, room, now_s, prompt_of)
        if not actions:
            reason = f"no replica is ready to go on: {flight.reason}" if flight.reason else "no replica is ready"
            return self._fail(flight, Cause.NO_REPLICA, reason, [])
        if flight.num_retries:
            self.num_continuations += bool(flight.given)
            self.num_retries += not flight.given
        self._move(flight, Stage.WAITING, "attempt")
        return actions + self._inquiries.begin(now_s)

    def _on_broken(self, flight: Flight, reason: str, now_s: float) -> list[Action]:
        """What the decode leg says cannot be the rest of the answer."""
        trouble = _Trouble(cause=Cause.BROKEN_OUTPUT, reason=reason, blamed=flight.legs[-1:], cancelled=flight.legs)
        return self._go_on(flight, trouble, now_s)

    def _go_on(self, flight: Flight, trouble: _Trouble, now_s: float) -> list[Action]:
        """An attempt has failed: make another one, now or later, if the request may have one."""
        self._attempts.blame(flight, trouble.blamed, now_s)
        if flight.num_retries >= self._config.max_retries:
            return self._fail(flight, trouble.cause, trouble.reason, trouble.cancelled)
        actions = self._attempts.leave(flight, trouble.cancelled)
        self._move(flight, Stage.BETWEEN, trouble.cause)
        flight.reason = trouble.reason
        flight.num_retries += 1
        if flight.num_retries == 1:
            return actions + self._begin(flight, self._draw(), now_s)
        flight.due_s = now_s + self._config.retry_backoff_s * 2 ** (flight.num_retries - 2)
        return [*actions, Wait(until_s=flight.due_s)]

    def _fail(self, flight: Flight, cause: Cause, reason: str, cancelled: Sequence[Peer]) -> list[Action]:
        """End a request without a whole answer."""
        actions = self._end(flight, Stage.FAILED, cause, cancelled)
        return [*actions, Fail(room=flight.room, cause=cause, reason=reason)]

    def _end(self, flight: Flight, stage: Stage, event: str, cancelled: Sequence[Peer]) -> list[Action]:
        """Forget the request and cancel the given legs."""
        actions = self._attempts.leave(flight, cancelled)
        self._move(flight, stage, event)
        self.ended[stage] += 1
        del self._flights[flight.room]
        return actions

    def _drop(self, why: str) -> list[Action]:
        self.dropped[why] += 1
        return []

    def _move(self, flight: Flight, stage: Stage, event: str) -> None:
        flight.stage = move(MOVES, flight.stage, stage, event, f"room {flight.room}")
