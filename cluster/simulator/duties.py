"""What the router owes to replicas: no leg of an attempt that is over works on without having been told to stop."""

from collections.abc import Callable

from cluster.simulator.memory import Violation
from cluster.spec.ids import Room
from cluster.spec.messages import Cancel, Failure, Output, Submit
from router.request import Send


class Duties:
    """Follows what one start of the router sends and hears."""

    def __init__(self) -> None:
        self._at_work: dict[Room, set[str]] = {}
        """By attempt, the addresses of legs that have neither done their part nor been told to stop."""
        self._submits: dict[Room, Submit] = {}

    def note_sent(self, send: Send) -> None:
        """The router tells a leg to begin, or to stop."""
        message = send.message
        if isinstance(message, Submit):
            self._submits[message.room] = message
            self._at_work.setdefault(message.room, set()).add(send.address)
        elif isinstance(message, Cancel):
            self._drop(message.room, send.address)

    def note_heard(self, message: Output | Failure) -> None:
        """A leg says that it has done its part, or will not do it."""
        submit = self._submits.get(message.room)
        if submit is None:
            return
        sender = (message.replica, message.incarnation)
        for leg in filter(None, (submit.prefill, submit.decode)):
            has_ended = isinstance(message, Failure) or message.finish is not None
            if (leg.replica, leg.incarnation) == sender and has_ended:
                self._drop(message.room, leg.address)
        is_from_decode = sender == (submit.decode.replica, submit.decode.incarnation)
        if isinstance(message, Output) and is_from_decode and submit.prefill is not None:
            self._drop(message.room, submit.prefill.address)

    def check(self, is_under_way: Callable[[Room], bool]) -> None:
        """Whoever still works does so for an attempt under way."""
        for room, addresses in self._at_work.items():
            if not is_under_way(room):
                raise Violation(f"the attempt in room {room} is over, and {', '.join(sorted(addresses))} not told so")

    def _drop(self, room: Room, address: str) -> None:
        addresses = self._at_work.get(room, set())
        addresses.discard(address)
        if not addresses:
            self._at_work.pop(room, None)
