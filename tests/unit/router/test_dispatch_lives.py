"""Random lives of requests that must leave nothing behind, and that no event is read as another's."""

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from cluster.simulator.promises import Duties
from cluster.spec.config import RouterConfig
from cluster.spec.ids import Incarnation, ReplicaId, Room
from cluster.spec.sampling import FinishReason, Sampling, Stopping
from cluster.spec.token_ids import TokenIds
from router.attempts import Breakers, LoadBook
from router.dispatch import RequestTable
from router.request import Action, AttemptStarted, Fail, GenerateRequest, OutputChunk, RequestId, Send, Targets
from tests.fakes.bootstrap import peer_of
from tests.fakes.dispatching import (
    ASK,
    ME,
    NOW,
    PREFILL,
    assert_empty,
    failure,
    make,
    output,
)


@given(seed=st.integers(0, 2**32), num_events=st.integers(1, 150), max_retries=st.integers(0, 3))
def test_random_lives_leave_nothing_behind(seed: int, num_events: int, max_retries: int) -> None:
    """Whatever comes, every request ends once, its tokens are a gapless prefix, and no live leg misses its Cancel."""
    life = _RandomLife(random.Random(seed), max_retries)
    for _ in range(num_events):
        life.step()
    life.take(life.dispatch.expire(1e9))
    assert_empty(life.dispatch)
    assert life.ends == dict.fromkeys(life.received, 1)


class _RandomLife:
    def __init__(self, rng: random.Random, max_retries: int) -> None:
        self.rng = rng
        self.now_s = 0.0
        self.peers = [peer_of(f"{role}-{i}") for role in ("prefill", "decode") for i in range(2)]
        rooms = itertools.count(1)
        config = RouterConfig(max_retries=max_retries)
        self.dispatch = RequestTable(
            ME, config, LoadBook(), Breakers(2, 10.0), lambda *_: self._pick(), draw=lambda: Room(next(rooms))
        )
        self.duties = Duties()
        self.attempts: dict[Room, RequestId] = {}
        """Requests by room."""
        self.ends: dict[RequestId, int] = {}
        self.received: dict[RequestId, list[int]] = {}

    def step(self) -> None:
        self.now_s += self.rng.uniform(0, 1)
        events = [
            self._open,
            self._output,
            self._output,
            self._output,
            self._fail,
            self._lose,
            self._leave,
            self._expire,
        ]
        self.rng.choice(events)()
        self.dispatch.check_integrity()
        self.duties.check(self.dispatch.is_under_way)

    def take(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self.duties.note_sent(action)
            if isinstance(action, AttemptStarted):
                self.attempts[action.room] = action.request_id
            if isinstance(action, OutputChunk):
                self.received[action.request_id] += action.token_ids
                assert self.received[action.request_id] == list(range(len(self.received[action.request_id])))
            if isinstance(action, Fail) or (isinstance(action, OutputChunk) and action.finish):
                self._count_end(action.request_id)

    def _pick(self) -> Targets | None:
        targets = Targets(prefill=self.rng.choice(self.peers[:2]), decode=self.rng.choice(self.peers[2:]))
        return targets if self.rng.random() < 0.9 else None

    def _count_end(self, request_id: RequestId) -> None:
        self.ends[request_id] = self.ends.get(request_id, 0) + 1

    def _any_room(self) -> Room:
        """Of an attempt, mostly of one of the newest."""
        return self.rng.choice([*list(self.attempts)[-8:], *self.attempts, Room(10**6)])

    def _open(self) -> None:
        request = GenerateRequest(
            prompt_ids=TokenIds.of([0] * self.rng.randint(1, 5)), sampling=Sampling(), stopping=Stopping(max_tokens=6)
        )
        request_id, actions = self.dispatch.open(request, self.now_s + self.rng.uniform(0, 100), self.now_s)
        self.received[request_id] = []
        self.take(actions)

    def _output(self) -> None:
        first, length = self.rng.randint(0, 5), self.rng.randint(0, 3)
        room = self._any_room()
        given = self.received.get(self.attempts.get(room, RequestId(0)), [])
        first = len(given) if self.rng.random() < 0.7 else first
        finish = FinishReason.STOP if self.rng.random() < 0.2 else None
        message = output(room, first, *range(first, first + length), peer=self.rng.choice(self.peers), finish=finish)
        self.duties.note_heard(message)
        self.take(self.dispatch.on_output(message, self.now_s))

    def _fail(self) -> None:
        message = failure(self._any_room(), self.rng.choice(self.peers), self.rng.random() < 0.9)
        self.duties.note_heard(message)
        self.take(self.dispatch.on_failure(message, self.now_s))

    def _lose(self) -> None:
        self.take(self.dispatch.on_lost(self.rng.choice(self.peers), self.now_s))

    def _leave(self) -> None:
        request_id = self.attempts.get(self._any_room(), RequestId(0))
        if self.dispatch.is_open(request_id):
            self.take(self.dispatch.on_client_left(request_id))
            self._count_end(request_id)

    def _expire(self) -> None:
        self.take(self.dispatch.expire(self.now_s))


def test_ids_are_not_confused_between_starts() -> None:
    old, new = peer_of("decode-0", 1), peer_of("decode-0", 2)
    dispatch = make(*[Targets(prefill=PREFILL, decode=decode) for decode in (old, new)])
    dispatch.open(ASK, 1.0, NOW)
    dispatch.open(ASK, 1.0, NOW)
    lines = dispatch.load.lines()
    assert lines[ReplicaId("decode-0"), Incarnation(1)] == lines[ReplicaId("decode-0"), Incarnation(2)]
    dispatch.on_lost(old, NOW)
    assert dispatch.num_open == 1
