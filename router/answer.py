"""One HTTP response's hold on its open requests: while it lives they run, when it is left they are cancelled."""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from cluster.spec.ids import Room
from cluster.spec.messages import Peer
from router.stream import Stream


class Answer:
    """The choices of one response; leaving its ``with`` block cancels what is still open."""

    def __init__(
        self, num_choices: int, enough: Callable[[Room], None], leave: Callable[[Sequence[Room]], None]
    ) -> None:
        self._enough = enough
        self._leave = leave
        self._rooms: list[Room] = []
        self._prefills: dict[str, None] = {}
        self._decodes: dict[str, None] = {}
        self._timeline: dict[str, str] = {}
        self.stream = Stream(num_choices)

    def add(self, room: Room, computes: Peer | None, decode: Peer, *, timed: bool = False) -> None:
        """The next choice is in this room. ``computes`` its prompt: prefill or decode, nobody if another choice has."""
        self._rooms.append(room)
        if computes is not None:
            self._prefills[computes.replica] = None
        self._decodes[decode.replica] = None
        if timed:
            self._timeline = {"x-baton-timeline": f"/timelines/{room}"}

    @property
    def headers(self) -> dict[str, str]:
        """Which replicas answer, and where the timeline will be if there is to be one."""
        replicas = {"x-baton-prefill": ", ".join(self._prefills), "x-baton-decode": ", ".join(self._decodes)}
        return replicas | self._timeline

    def enough(self, index: int) -> None:
        """A choice is complete before the model ended it."""
        self._enough(self._rooms[index])
        self.stream.finish(index)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(self._rooms)
