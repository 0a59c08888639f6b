"""What the router processes that share a port tell each other, so that limits and figures are those of all of them."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from cluster.spec import wire
from cluster.spec.clock import Clock, SystemClock
from cluster.spec.ids import Incarnation, ReplicaId, Room
from cluster.spec.worker_spec import RouterPlace
from router.board import Board
from router.measures import Told
from router.policies.candidate import Load

LoadKey = tuple[ReplicaId, Incarnation]
TELL_S = 0.02
"""Between two looks at what has changed elsewhere."""
_SILENT_S = 3.0
"""Without a word, after which a process counts as gone."""
_LOOKS_PER_ACCOUNT = 25
"""Figures for people and Prometheus are told so much less often."""


class Account(msgspec.Struct, frozen=True, array_like=True):
    """What one API key does at one router process."""

    num_open: int = 0
    num_tokens: int = 0
    """Used since the process started."""
    spent: float = 0.0
    """By all processes and not yet made good by time, as this one last knew."""
    as_of_s: float = 0.0


class Now(msgspec.Struct, frozen=True):
    """What one router process has open."""

    num_open: int = 0
    num_waiting: int = 0
    loads: dict[LoadKey, Load] = {}
    accounts: dict[str, Account] = {}
    timed: dict[Room, str] = {}
    """The timed requests that it knows, and the inbox where it can be asked for them."""


class Figures(msgspec.Struct, frozen=True):
    """What one router process has counted, and the requests that ended there last."""

    told: Told = {}
    recent: list[dict[str, Any]] = []


_encoder = msgspec.msgpack.Encoder()
_now_decoder = msgspec.msgpack.Decoder(Now)
_figures_decoder = msgspec.msgpack.Decoder(Figures)


class Siblings:
    """The other router processes of the cluster; a router alone has none, and tells nobody anything."""

    def __init__(self, place: RouterPlace, clock: Clock | None = None) -> None:
        num = place.num_processes
        self._clock = clock or SystemClock()
        self._index = place.index
        self._others = [index for index in range(num) if index != place.index]
        self._num = num
        # Each has a page of what changes all the time, and one of figures.
        self._board = Board(place.board, 2 * num) if num > 1 else None
        self._is_paused = False
        self._seen: dict[int, tuple[int, Now]] = {}
        self._loads: dict[LoadKey, Load] = {}
        self._beats: dict[int, tuple[int, float]] = {}
        """The number of each page, and since when."""
        self._silent: set[int] = set()
        """Those that do not write any more: what they had open is as lost as they are."""
        self._tell_now: Callable[[], Now] = Now
        self._tell_figures: Callable[[], Figures] = Figures
        self._looks = itertools.count()

    def watch(self, tell_now: Callable[[], Now], tell_figures: Callable[[], Figures]) -> None:
        """Tell the others these from now on."""
        self._tell_now, self._tell_figures = tell_now, tell_figures

    @property
    def is_alone(self) -> bool:
        """There are no others, and never will be."""
        return self._board is None

    @property
    def is_paused(self) -> bool:
        """An administrator has told all of them to take no new requests."""
        return self._is_paused if self._board is None else self._board.flag

    @is_paused.setter
    def is_paused(self, value: bool) -> None:
        if self._board is None:
            self._is_paused = value
        else:
            self._board.flag = value

    def tell(self) -> None:
        """Let the others see what has changed here; at once, where they may decide by it."""
        if self._board is not None:
            self._board.write(self._index, _encoder.encode(self._tell_now()))

    def look(self) -> None:
        """Tell everything that is due, and see who lives; called every ``TELL_S``."""
        self.tell()
        if self._board is None:
            return
        if next(self._looks) % _LOOKS_PER_ACCOUNT == 0:
            self._board.write(self._num + self._index, _encoder.encode(self._tell_figures()))
        now_s = self._clock.now_s()
        for index in self._others:
            number = self._board.number(index)
            before, since_s = self._beats.get(index, (None, now_s))
            if number != before:
                self._beats[index] = number, now_s
                self._silent.discard(index)
            elif now_s - since_s > _SILENT_S and index not in self._silent:
                self._silent.add(index)
                self._forget(index)

    @property
    def loads(self) -> Mapping[LoadKey, Load]:
        """What the others have open at each replica."""
        if self._board is not None:
            self._read_all()
        return self._loads

    @property
    def num_open(self) -> int:
        """Requests that are open at others."""
        return sum(now.num_open for now in self._read_all())

    @property
    def num_waiting(self) -> int:
        """HTTP requests that wait at others."""
        return sum(now.num_waiting for now in self._read_all())

    @property
    def timed(self) -> dict[Room, str]:
        """The timed requests that others know, and the inbox where to ask for each."""
        return {room: address for now in self._read_all() for room, address in now.timed.items()}

    def account(self, name: str) -> Account:
        """What one API key does at others."""
        lines = [now.accounts[name] for now in self._read_all() if name in now.accounts]
        newest = max(lines, key=lambda line: line.as_of_s, default=Account())
        num_open, num_tokens = sum(line.num_open for line in lines), sum(line.num_tokens for line in lines)
        return Account(num_open, num_tokens, newest.spent, newest.as_of_s)

    def figures(self) -> Iterator[Figures]:
        """Of each of the others, not much older than half a second."""
        for index in self._others:
            content = self._board.read(self._num + index) if self._board is not None else None
            if content is not None:
                with suppress(msgspec.DecodeError):
                    yield wire.decode(_figures_decoder, content)

    def _read_all(self) -> list[Now]:
        """What the others say now, read again where it has changed."""
        has_changed = False
        for index in self._others:
            assert self._board is not None
            if index in self._silent:
                continue
            number = self._board.number(index)
            if self._seen.get(index, (0, None))[0] == number or (content := self._board.read(index)) is None:
                continue
            with suppress(msgspec.DecodeError):  # a process that writes what nobody can read has said nothing
                self._seen[index] = number, wire.decode(_now_decoder, content)
                has_changed = True
        if has_changed:
            self._loads = _sum_of(now for _, now in self._seen.values())
        return [now for _, now in self._seen.values()]

    def _forget(self, index: int) -> None:
        if self._seen.pop(index, None) is not None:
            self._loads = _sum_of(now for _, now in self._seen.values())


def _sum_of(all_nows: Iterator[Now]) -> dict[LoadKey, Load]:
    loads: dict[LoadKey, Load] = {}
    for now in all_nows:
        for key, load in now.loads.items():
            loads[key] = loads[key].plus(load) if key in loads else load
    return loads
