"""Requests with grammars on the rank of the leader, between their arrival and the scheduler."""

from concurrent.futures import Future

from msgspec.structs import replace

from cluster.grammar import Compiled, Grammars, compile_s
from cluster.spec.ids import Room
from cluster.spec.messages import Inquire, Submit
from workers.scheduler.replica_leader import ReplicaLeader

_MOST_HELD_S = 4.0
"""Maximum compile time of all open requests' grammars: over a thousand simple ones, which take about 400 MiB."""


class GrammarGate:
    """Gate that passes requests on once their grammars are compiled, because a step would wait for them.

    The grammars of open requests stay compiled.
    """

    def __init__(self, grammars: Grammars | None, leader: ReplicaLeader) -> None:
        self._grammars, self._leader = grammars, leader
        self._waiting: list[tuple[Future[Compiled], Submit]] = []
        self._held: dict[Room, Future[Compiled]] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def submit(self, submit: Submit, now_s: float) -> None:
        """Pass a request on now or later."""
        if not submit.sampling.grammar or self._grammars is None:
            self._leader.on_message(submit, now_s)
            return
        self._waiting.append((self._grammars.prepare(submit.sampling.grammar, submit.tenant), submit))
        self.pass_on(now_s)

    def unless_waiting(self, inquire: Inquire) -> Inquire:
        """Return an inquiry without the requests that wait here, which the leader would report as lost."""
        waiting = {submit.room for _, submit in self._waiting}
        return replace(inquire, rooms=[room for room in inquire.rooms if room not in waiting])

    def pass_on(self, now_s: float) -> None:
        """Pass on the requests whose grammars are compiled. Refuse those for which there is no room."""
        for compiled, submit in list(self._waiting):
            if not compiled.done():
                continue
            self._waiting.remove((compiled, submit))
            if self._hold(submit.room, compiled):
                self._leader.on_message(submit, now_s)
            else:
                self._leader.refuse(submit, "too many grammars are in use; try again")

    def release(self) -> None:
        """Release the grammars of requests that have ended."""
        for room in [room for room in self._held if not self._leader.has(room)]:
            del self._held[room]

    def _hold(self, room: Room, compiled: Future[Compiled]) -> bool:
        """Keep a request's grammar compiled. Return False if there is no room for it."""
        if sum(map(compile_s, {*self._held.values(), compiled})) > _MOST_HELD_S:
            return False
        self._held[room] = compiled
        return True
