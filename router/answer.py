"""One HTTP response's hold on its open requests: while it lives they run, when it is left they are cancelled."""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from cluster.spec.ids import Room
from router.flight import Pair
from router.stream import Stream

HEADERS = ("x-baton-prefill", "x-baton-decode", "server-timing", "x-baton-timeline")
"""Those of every answer, and of timed ones."""


class Answer:
    """The choices of one response; leaving its ``with`` block cancels what is still open."""

    def __init__(
        self, num_choices: int, enough: Callable[[Room], None], leave: Callable[[Sequence[Room]], None]
    ) -> None:
        self._enough = enough
        self._leave = leave
        self.rooms: list[Room] = []
        """Names of the requests, one a choice."""
        self._pairs: dict[Room, Pair] = {}
        self._timeline: dict[str, str] = {}
        self.stream = Stream(num_choices)
        self.queue_s = 0.0
        """Wait for room at the replicas, and when it ended."""
        self.opened_s = 0.0
        self.trace: dict[str, str] = {}
        """Header that names the trace it is in."""

    def add(self, room: Room, *, timed: bool = False) -> None:
        """The request of the next choice has this name."""
        self.rooms.append(room)
        if timed:
            self._timeline = {"x-baton-timeline": f"/timelines/{room}"}

    def place(self, room: Room, pair: Pair) -> None:
        """A request is now computed there."""
        self._pairs[room] = pair

    @property
    def is_timed(self) -> bool:
        """Its requests are."""
        return bool(self._timeline)

    @property
    def headers(self) -> dict[str, str]:
        """Which replicas compute prompts and answers, how long each phase took, and where there is more about it."""
        prefills = dict.fromkeys(pair.computes.replica for pair in self._pairs.values() if pair.computes is not None)
        decodes = dict.fromkeys(pair.decode.replica for pair in self._pairs.values())
        replicas = {"x-baton-prefill": ", ".join(prefills), "x-baton-decode": ", ".join(decodes)}
        return replicas | {"server-timing": self._timing} | self._timeline | self.trace

    @property
    def _timing(self) -> str:
        """As https://www.w3.org/TR/server-timing has it."""
        phases = self.stream.phases
        times = {"queue": self.queue_s}
        if phases is not None:
            times |= {"decode-queue": phases.decode_queue_s, "bootstrap": phases.bootstrap_s}
            times |= {"prefill": phases.prefill_s, "transfer": phases.transfer_s}
        return ", ".join(f"{name};dur={seconds * 1000:.3f}" for name, seconds in times.items())

    def enough(self, index: int) -> None:
        """A choice is complete before the model ended it."""
        self._enough(self.rooms[index])
        self.stream.finish(index)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(self.rooms)
