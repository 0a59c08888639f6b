"""The attempts under way: on which pair each runs, in which room, and what it adds to load and breakers. Sans I/O."""

from collections.abc import Collection, Iterable, Iterator, Sequence

from cluster.spec.ids import Room
from cluster.spec.messages import Cancel
from cluster.spec.peer import Peer
from router.actions import Action, Place, Send
from router.breaker import Breakers
from router.flight import Attempt, Flight, Pair, Pick, Stage
from router.load import LoadBook


class Attempts:
    """At most one for each request."""

    def __init__(self, me: Peer, load: LoadBook, breakers: Breakers, pick: Pick) -> None:
        self._me = me
        self._load = load
        self._breakers = breakers
        self._pick = pick
        self._flights: dict[Room, Flight] = {}
        """By the room of the attempt, never by that of one which is over."""

    def __contains__(self, room: Room) -> bool:
        return room in self._flights

    def __len__(self) -> int:
        return len(self._flights)

    def find(self, room: Room) -> Flight | None:
        """The request that has its attempt in this room."""
        return self._flights.get(room)

    def silent_since(self, time_s: float) -> Iterator[Attempt]:
        """Those of which nothing was heard since then."""
        for flight in self._flights.values():
            if flight.heard_s <= time_s and flight.attempt is not None:
                yield flight.attempt

    def begin(self, flight: Flight, room: Room, now_s: float, prompt_of: Flight | None = None) -> list[Action]:
        """Make an attempt, where the choice runs that brings the prompt if there is one; nothing without a replica."""
        first = prompt_of.attempt if prompt_of is not None else None
        if first is not None:
            pair: Pair | None = Pair(prefill=None, decode=first.pair.decode, brings_prompt=False)
        else:
            pair = self._pick(flight.ask, room, frozenset(flight.avoided), now_s)
        if pair is None:
            return []
        assert room not in self._flights, f"room {room} drawn twice"
        attempt = flight.begin(room, pair, first.room if first is not None else None)
        self._flights[room] = flight
        flight.heard_s = now_s
        if pair.prefill is not None:
            self._load.add(pair.prefill, attempt.prefill_len)
        self._load.add(pair.decode, attempt.decode_len)
        for leg in pair.legs:
            self._breakers.begin(leg, room, now_s)
        submit = flight.submit(attempt, self._me)
        sends = [Send(address=leg.address, message=submit) for leg in pair.legs]
        return [Place(room=flight.room, attempt=room, pair=pair), *sends]

    def prefill_done(self, flight: Flight) -> None:
        """The first tokens of the attempt are there."""
        assert flight.attempt is not None
        self._leave_prefill(flight.attempt)
        if flight.attempt.pair.prefill is not None:
            self._breakers.succeed(flight.attempt.pair.prefill)

    def decode_done(self, flight: Flight) -> None:
        """So are the last ones that anybody wants."""
        assert flight.attempt is not None
        self._breakers.succeed(flight.attempt.pair.decode)

    def blame(self, flight: Flight, peers: Iterable[Peer], now_s: float) -> None:
        """These have failed the request."""
        for peer in peers:
            self._breakers.fail(peer, now_s)
            flight.avoided.add(peer)

    def leave(self, flight: Flight, cancelled: Sequence[Peer]) -> list[Action]:
        """Forget the attempt of a request, if it has one, and cancel the given legs."""
        attempt = flight.attempt
        if attempt is None:
            return []
        if flight.stage is Stage.WAITING:
            self._leave_prefill(attempt)
        self._load.remove(attempt.pair.decode, attempt.decode_len)
        for leg in attempt.pair.legs:
            self._breakers.end(leg, attempt.room)
        del self._flights[attempt.room]
        flight.attempt = None
        return [
            Send(address=peer.address, message=Cancel(room=attempt.room, incarnation=peer.incarnation))
            for peer in cancelled
        ]

    def forget(self, peer: Peer) -> None:
        """A replica is gone for good, and none of its attempts is left."""
        self._breakers.forget(peer)

    def check_integrity(self, flights: Collection[Flight]) -> None:
        """Of all open requests: the attempts known are theirs, and the load book is the sum of them."""
        expected = LoadBook()
        under_way = {flight.attempt.room: flight for flight in flights if flight.attempt is not None}
        assert self._flights == under_way, f"attempts {self._flights.keys()} are not {under_way.keys()}"
        for flight in under_way.values():
            assert flight.attempt is not None
            pair = flight.attempt.pair
            if flight.stage is Stage.WAITING and pair.prefill is not None:
                expected.add(pair.prefill, flight.attempt.prefill_len)
            expected.add(pair.decode, flight.attempt.decode_len)
        assert self._load.lines() == expected.lines(), f"load {self._load.lines()} is not {expected.lines()}"

    def _leave_prefill(self, attempt: Attempt) -> None:
        if attempt.pair.prefill is not None:
            self._load.remove(attempt.pair.prefill, attempt.prefill_len)
