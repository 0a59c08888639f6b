"""The life of every open request, sans I/O: events in, actions out; ``router.relay`` is the loop around it.

1. ``open`` draws a room and sends the same Submit to the prefill and the decode leader.
2. Outputs of the decode leader become tokens for the client; the first one means that prefill is done.
3. The last Output, a failure of a leg, a client that left, a lost replica or the deadline ends the request. Whatever
   the cause, no leg that may still work goes without a Cancel, and nothing of the request is kept.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from cluster.spec.ids import Room, draw_room
from cluster.spec.lifecycle import move
from cluster.spec.messages import Cancel, Failure, Output, Peer, Submit
from cluster.spec.sampling import TokenLogprobs
from cluster.spec.tiers import CachedTokens
from router.flight import ENDS, MOVES, Action, Ask, Cause, Emit, Fail, Flight, Send, Stage
from router.load import LoadBook


class Dispatch:
    """All open requests of one router."""

    def __init__(self, me: Peer, draw: Callable[[], Room] = draw_room) -> None:
        self.me = me
        self._draw = draw
        self._flights: dict[Room, Flight] = {}
        self.load = LoadBook()
        self.dropped: Counter[str] = Counter()
        """Messages that were not used: of a ``late`` room, from a ``foreign`` sender, ``duplicate``."""
        self.ended: Counter[Stage] = Counter()
        """Requests by how they ended."""

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._flights)

    @property
    def next_deadline_s(self) -> float | None:
        """When the first open request expires."""
        return min((flight.deadline_s for flight in self._flights.values()), default=None)

    def is_open(self, room: Room) -> bool:
        """Whether this request has not ended."""
        return room in self._flights

    def draw_room(self) -> Room:
        """A room for the next ``open``, for those who choose replicas by it."""
        return self._draw()

    def open(
        self,
        ask: Ask,
        prefill: Peer | None,
        decode: Peer,
        deadline_s: float,
        room: Room | None = None,
        cached_tokens: int = 0,
        prompt_of: Room | None = None,
    ) -> tuple[Room, list[Action]]:
        """Start a request on a pair of replicas.

        Args:
            prefill: None where decode computes what it does not have of the prompt.
            room: one that ``draw_room`` gave; a fresh one by default.
            cached_tokens: of the prompt, that prefill is not expected to compute.
            prompt_of: the room of another choice, on the same decode replica, that brings the prompt.
        """
        room = self._draw() if room is None else room
        assert room not in self._flights, f"room {room} drawn twice"
        flight = Flight(
            room=room,
            prefill=prefill,
            decode=decode,
            prompt_len=len(ask.prompt_ids) if prompt_of is None else 0,
            prefill_len=len(ask.prompt_ids) - cached_tokens,
            max_tokens=ask.stopping.max_tokens,
            has_logprobs=ask.sampling.num_logprobs is not None,
            deadline_s=deadline_s,
        )
        self._flights[room] = flight
        if prefill is not None:
            self.load.add(prefill, flight.prefill_len)
        self.load.add(decode, flight.decode_tokens)
        submit = Submit(
            room=room,
            prompt_ids=ask.prompt_ids,
            sampling=ask.sampling,
            stopping=ask.stopping,
            prefill=prefill,
            decode=decode,
            router=self.me,
            prompt_of=prompt_of,
            cache_salt=ask.cache_salt,
            priority=ask.priority,
            timed=ask.timed,
            dp_rank=ask.dp_rank,
        )
        return room, [Send(address=peer.address, message=submit) for peer in flight.legs]

    def on_output(self, output: Output) -> list[Action]:
        """Tokens arrived."""
        flight = self._flight_of(output)
        if flight is None:
            return []
        if (output.replica, output.incarnation) != (flight.decode.replica, flight.decode.incarnation):
            return self._drop("foreign")
        if problem := flight.problem(output):
            return self._fail(flight, Cause.BROKEN_OUTPUT, f"{output.replica}: {problem}", flight.legs)
        num_known = flight.num_received - output.first_index
        token_ids, logprobs = output.token_ids[num_known:], output.logprobs[num_known:]
        if not token_ids and output.finish is None:
            return self._drop("duplicate")
        flight.num_received += len(token_ids)
        cached, prompt_logprobs = CachedTokens(), list[TokenLogprobs]()
        if flight.stage is Stage.WAITING:
            self._leave_prefill(flight)
            self._move(flight, Stage.STREAMING, "first output")
            cached, prompt_logprobs = output.cached, output.prompt_logprobs
        if output.finish is not None:
            self._end(flight, Stage.FINISHED, "last output", [])
        return [
            Emit(
                room=flight.room,
                token_ids=token_ids,
                finish=output.finish,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                cached=cached,
            )
        ]

    def on_failure(self, failure: Failure) -> list[Action]:
        """A leg gave up; the other one is cancelled at once."""
        flight = self._flight_of(failure)
        if flight is None:
            return []
        legs = {(peer.replica, peer.incarnation): peer for peer in flight.legs}
        failed = legs.get((failure.replica, failure.incarnation))
        if failed is None:
            return self._drop("foreign")
        if failed is flight.prefill and flight.stage is Stage.STREAMING:
            return self._drop("late")
        cause = Cause.REPLICA_FAILED if failure.retryable else Cause.REFUSED
        others = [peer for peer in legs.values() if peer is not failed]
        return self._fail(flight, cause, f"{failure.replica}: {failure.reason}", others)

    def on_lost(self, peer: Peer) -> list[Action]:
        """A replica is gone. It gets its Cancels all the same: perhaps only the way to the table is broken."""
        actions: list[Action] = []
        for flight in list(self._flights.values()):
            waits_for = flight.legs if flight.stage is Stage.WAITING else [flight.decode]
            if any((leg.replica, leg.incarnation) == (peer.replica, peer.incarnation) for leg in waits_for):
                reason = f"{peer.replica} was lost before the answer was whole"
                actions += self._fail(flight, Cause.REPLICA_LOST, reason, flight.legs)
        return actions

    def on_unreachable(self, room: Room, reason: str) -> list[Action]:
        """A Submit could not be handed over."""
        flight = self._flights.get(room)
        if flight is None:
            return []
        return self._fail(flight, Cause.REPLICA_LOST, reason, flight.legs)

    def on_client_left(self, room: Room) -> list[Action]:
        """Nobody reads the answer any more."""
        flight = self._flights[room]
        return self._end(flight, Stage.CANCELLED, "client left", flight.legs)

    def on_slow_reader(self, room: Room, reason: str) -> list[Action]:
        """The client reads more slowly than may be kept for it."""
        return self._fail(self._flights[room], Cause.SLOW_READER, reason, self._flights[room].legs)

    def on_enough(self, room: Room) -> list[Action]:
        """A stop string completed the answer before the model ended it."""
        flight = self._flights[room]
        return self._end(flight, Stage.FINISHED, "stop string", flight.legs)

    def expire(self, now_s: float) -> list[Action]:
        """Fail the requests whose deadline has passed."""
        actions: list[Action] = []
        for flight in [flight for flight in self._flights.values() if flight.deadline_s <= now_s]:
            reason = f"not finished before its deadline; {flight.num_received} tokens were generated"
            actions += self._fail(flight, Cause.TIMED_OUT, reason, flight.legs)
        return actions

    def stop(self) -> list[Action]:
        """Fail everything that is open."""
        return [
            action
            for flight in list(self._flights.values())
            for action in self._fail(flight, Cause.STOPPED, "the router stops", flight.legs)
        ]

    def check_integrity(self) -> None:
        """Every open request is in an open stage, and the load book is the sum of the open requests."""
        expected = LoadBook()
        for room, flight in self._flights.items():
            assert room == flight.room, f"room {flight.room} is filed under {room}"
            assert flight.stage not in ENDS, f"room {room} is {flight.stage.name} and still open"
            if flight.stage is Stage.WAITING and flight.prefill is not None:
                expected.add(flight.prefill, flight.prefill_len)
            expected.add(flight.decode, flight.decode_tokens)
        assert self.load.lines() == expected.lines(), f"load {self.load.lines()} is not {expected.lines()}"

    def _flight_of(self, message: Output | Failure) -> Flight | None:
        flight = self._flights.get(message.room)
        if flight is None:
            self._drop("late")
        return flight

    def _drop(self, why: str) -> list[Action]:
        self.dropped[why] += 1
        return []

    def _fail(self, flight: Flight, cause: Cause, reason: str, cancelled: Sequence[Peer]) -> list[Action]:
        cancels = self._end(flight, Stage.FAILED, cause.value, cancelled)
        return [*cancels, Fail(room=flight.room, cause=cause, reason=reason)]

    def _end(self, flight: Flight, stage: Stage, event: str, cancelled: Sequence[Peer]) -> list[Action]:
        """Forget the request and cancel the given legs."""
        self._leave_prefill(flight)
        self.load.remove(flight.decode, flight.decode_tokens)
        self._move(flight, stage, event)
        self.ended[stage] += 1
        del self._flights[flight.room]
        return [
            Send(address=peer.address, message=Cancel(room=flight.room, incarnation=peer.incarnation))
            for peer in cancelled
        ]

    def _leave_prefill(self, flight: Flight) -> None:
        """Prefill has done its part, or need not."""
        if flight.stage is Stage.WAITING and flight.prefill is not None:
            self.load.remove(flight.prefill, flight.prefill_len)

    def _move(self, flight: Flight, stage: Stage, event: str) -> None:
        flight.stage = move(MOVES, flight.stage, stage, event, f"room {flight.room}")
