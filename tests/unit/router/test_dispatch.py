"""The life of a request, event by event, and random lives that must leave nothing behind."""

import itertools
import random
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.simulator.duties import Duties
from cluster.spec.config import RouterConfig
from cluster.spec.errors import IllegalTransitionError
from cluster.spec.ids import ROUTER, Incarnation, ReplicaId, Room
from cluster.spec.lifecycle import move
from cluster.spec.messages import Cancel, Failure, Output, Submit
from cluster.spec.peer import Peer
from cluster.spec.sampling import FinishReason, Sampling, Stopping, TokenLogprobs
from cluster.spec.tiers import CachedTokens
from router.actions import Action, Cause, Emit, Fail, Place, Send, Wait
from router.breaker import Breakers, BreakerState
from router.dispatch import Dispatch
from router.flight import ENDS, MOVES, Ask, Pair, Stage
from router.load import LoadBook
from router.policies.candidate import Load
from tests.fakes.bootstrap import peer_of

PREFILL, DECODE = peer_of("prefill-0"), peer_of("decode-0")
ME = Peer(replica=ROUTER, incarnation=Incarnation(1), address="tcp://router:1")
NOW = 5.0
ASK = Ask(prompt_ids=[1, 2, 3], sampling=Sampling(), stopping=Stopping(max_tokens=4))


def make(*pairs: Pair | None, max_retries: int = 0, avoided: list[frozenset[Peer]] | None = None) -> Dispatch:
    """The attempts run on these pairs, and then always on the same; ``avoided`` is told whom each should not get."""
    rooms, coming = itertools.count(1), iter(pairs)

    def pick(_ask: Ask, _room: Room, shunned: frozenset[Peer], _now_s: float) -> Pair | None:
        if avoided is not None:
            avoided.append(shunned)
        return next(coming, Pair(prefill=PREFILL, decode=DECODE))

    config = RouterConfig(max_retries=max_retries, retry_backoff_s=2.0, breaker_failures=2)
    breakers = Breakers(config.breaker_failures, config.breaker_s)
    return Dispatch(ME, config, LoadBook(), breakers, pick, draw=lambda: Room(next(rooms)))


def opened(dispatch: Dispatch, deadline_s: float = 100.0) -> Room:
    room, _ = dispatch.open(ASK, deadline_s, NOW)
    return room


def output(room: Room, first: int, *tokens: int, peer: Peer = DECODE, finish: FinishReason | None = None) -> Output:
    return Output(
        room=room,
        replica=peer.replica,
        incarnation=peer.incarnation,
        first_index=first,
        token_ids=list(tokens),
        finish=finish,
    )


def failure(room: Room, peer: Peer, retryable: bool = True) -> Failure:
    return Failure(
        room=room, replica=peer.replica, incarnation=peer.incarnation, reason="no memory", retryable=retryable
    )


def cancel(room: Room, peer: Peer) -> Send:
    return Send(address=peer.address, message=Cancel(room=room, incarnation=peer.incarnation))


def sends_of(actions: Sequence[Action]) -> list[Send]:
    return [action for action in actions if isinstance(action, Send)]


def assert_empty(dispatch: Dispatch) -> None:
    dispatch.check_integrity()
    assert dispatch.num_open == 0
    assert dispatch.load.lines() == {}
    assert dispatch.next_deadline_s is None


def test_open_sends_the_same_submit_to_both_leaders() -> None:
    dispatch = make()
    room, actions = dispatch.open(ASK, 1.0, NOW)
    sends = [action for action in actions if isinstance(action, Send)]
    assert [send.address for send in sends] == [PREFILL.address, DECODE.address]
    submit = sends[0].message
    assert sends[1].message == submit
    assert isinstance(submit, Submit)
    assert (submit.room, submit.router, submit.prompt_ids) == (room, ME, [1, 2, 3])
    assert submit.dp_rank is None


def test_the_dp_rank_that_a_client_wants_reaches_the_leaders() -> None:
    _, actions = make().open(msgspec.structs.replace(ASK, dp_rank=1), PREFILL, DECODE, 1.0)
    messages = [action.message for action in actions if isinstance(action, Send)]
    assert [message.dp_rank for message in messages if isinstance(message, Submit)] == [1, 1]


def test_load_is_counted_until_it_is_done() -> None:
    dispatch = make()
    room = opened(dispatch)
    lines = dispatch.load.lines()
    assert lines[PREFILL.replica, PREFILL.incarnation] == Load(num_requests=1, num_tokens=3)
    assert lines[DECODE.replica, DECODE.incarnation] == Load(num_requests=1, num_tokens=7)
    dispatch.on_output(output(room, 0, 9), NOW)
    assert list(dispatch.load.lines()) == [(DECODE.replica, DECODE.incarnation)]
    dispatch.on_output(output(room, 1, 8, finish=FinishReason.STOP), NOW)
    assert_empty(dispatch)


def test_what_prefill_has_cached_is_no_load() -> None:
    dispatch = make(Pair(prefill=PREFILL, decode=DECODE, cached_tokens=2))
    room, _ = dispatch.open(ASK, 1.0, NOW)
    assert dispatch.load.of(PREFILL) == Load(num_requests=1, num_tokens=1)
    dispatch.check_integrity()
    dispatch.on_output(output(room, 0, 9), NOW)
    dispatch.on_client_left(room)
    assert_empty(dispatch)


def test_a_further_choice_goes_to_decode_alone_and_counts_its_answer_there() -> None:
    dispatch = make()
    first = opened(dispatch)
    room, actions = dispatch.open(ASK, 1.0, NOW, prompt_of=first)
    (send,) = [action for action in actions if isinstance(action, Send)]
    assert isinstance(send.message, Submit)
    assert (send.address, send.message.prefill, send.message.prompt_of) == (DECODE.address, None, first)
    assert dispatch.load.of(PREFILL) == Load(num_requests=1, num_tokens=3)
    assert dispatch.load.of(DECODE) == Load(num_requests=2, num_tokens=7 + 4)
    dispatch.check_integrity()
    dispatch.on_output(output(room, 0, 9), NOW)
    assert [send.address for send in dispatch.on_client_left(room) if isinstance(send, Send)] == [DECODE.address]
    assert dispatch.load.of(PREFILL) == Load(num_requests=1, num_tokens=3)
    dispatch.on_client_left(first)
    assert_empty(dispatch)


def test_a_further_choice_is_tried_again_with_a_prefill_of_its_own() -> None:
    dispatch = make(max_retries=1)
    room, _ = dispatch.open(ASK, 100.0, NOW, prompt_of=opened(dispatch))
    sends = sends_of(dispatch.on_failure(failure(room, DECODE), NOW))
    assert [send.address for send in sends] == [PREFILL.address, DECODE.address]
    assert isinstance(sends[0].message, Submit)
    assert (sends[0].message.prefill, sends[0].message.prompt_of) == (PREFILL, None)
    assert dispatch.load.of(DECODE) == Load(num_requests=2, num_tokens=14)
    dispatch.check_integrity()


def test_tokens_come_out_in_order_and_the_last_ends_it() -> None:
    dispatch = make()
    room = opened(dispatch)
    assert dispatch.on_output(output(room, 0, 9), NOW) == [Emit(room=room, token_ids=[9], finish=None)]
    last = output(room, 1, 8, 7, finish=FinishReason.LENGTH)
    assert dispatch.on_output(last, NOW) == [Emit(room=room, token_ids=[8, 7], finish=FinishReason.LENGTH)]
    assert_empty(dispatch)
    assert dispatch.ended[Stage.FINISHED] == 1


def test_an_end_without_tokens() -> None:
    dispatch = make()
    room = opened(dispatch)
    dispatch.on_output(output(room, 0, 9), NOW)
    last = output(room, 1, finish=FinishReason.STOP)
    assert dispatch.on_output(last, NOW) == [Emit(room=room, token_ids=[], finish=FinishReason.STOP)]


class TestWrongOutputs:
    def test_a_duplicate_is_dropped(self) -> None:
        dispatch = make()
        room = opened(dispatch)
        dispatch.on_output(output(room, 0, 9, 8), NOW)
        assert dispatch.on_output(output(room, 0, 9, 8), NOW) == []
        assert dispatch.dropped == {"duplicate": 1}

    def test_only_the_new_part_of_an_overlap_is_used(self) -> None:
        dispatch = make()
        room = opened(dispatch)
        dispatch.on_output(output(room, 0, 9, 8), NOW)
        assert dispatch.on_output(output(room, 1, 8, 7), NOW) == [Emit(room=room, token_ids=[7], finish=None)]

    @pytest.mark.parametrize(
        ("message", "reason"),
        [
            (output(Room(1), 2, 7), "decode-0: output 1 is missing; 2 came next"),
            (output(Room(1), 1, 1, 2, 3, 4), "decode-0: 5 tokens came, 4 were asked for"),
            (output(Room(1), 0, finish=FinishReason.STOP), "decode-0: the answer ended at 0 tokens, but 1 came before"),
        ],
    )
    def test_what_cannot_follow_fails_the_request(self, message: Output, reason: str) -> None:
        dispatch = make()
        room = opened(dispatch)
        dispatch.on_output(output(room, 0, 9), NOW)
        assert dispatch.on_output(message, NOW) == [
            cancel(room, PREFILL),
            cancel(room, DECODE),
            Fail(room=room, cause=Cause.BROKEN_OUTPUT, reason=reason),
        ]
        assert_empty(dispatch)

    def test_logprobs_stay_with_their_tokens(self) -> None:
        dispatch = make()
        room, _ = dispatch.open(msgspec.structs.replace(ASK, sampling=Sampling(num_logprobs=0)), 100.0, NOW)
        told = [TokenLogprobs(logprob=-place, top_ids=[], top_logprobs=[]) for place in range(3)]
        dispatch.on_output(msgspec.structs.replace(output(room, 0, 9, 8), logprobs=told[:2]), NOW)
        (emit,) = dispatch.on_output(msgspec.structs.replace(output(room, 1, 8, 7), logprobs=told[1:]), NOW)
        assert emit == Emit(room=room, token_ids=[7], finish=None, logprobs=[told[2]])
        fail = dispatch.on_output(output(room, 3, 6), NOW)[-1]
        assert isinstance(fail, Fail)
        assert fail.reason == "decode-0: 1 tokens came with log-probabilities of 0"

    @pytest.mark.parametrize("peer", [PREFILL, peer_of("decode-0", 2), peer_of("decode-1")])
    def test_from_somebody_else(self, peer: Peer) -> None:
        dispatch = make()
        room = opened(dispatch)
        assert dispatch.on_output(output(room, 0, 9, peer=peer), NOW) == []
        assert dispatch.dropped == {"foreign": 1}
        assert dispatch.is_open(room)

    def test_of_an_ended_request(self) -> None:
        dispatch = make()
        room = opened(dispatch)
        dispatch.on_client_left(room)
        assert dispatch.on_output(output(room, 0, 9), NOW) == []
        assert dispatch.on_failure(failure(room, DECODE), NOW) == []
        assert dispatch.dropped == {"late": 2}


class TestFailures:
    @pytest.mark.parametrize(("failed", "other"), [(PREFILL, DECODE), (DECODE, PREFILL)])
    def test_the_other_leg_is_cancelled(self, failed: Peer, other: Peer) -> None:
        dispatch = make()
        room = opened(dispatch)
        reason = f"{failed.replica}: no memory"
        expected: list[Action] = [cancel(room, other), Fail(room=room, cause=Cause.REPLICA_FAILED, reason=reason)]
        assert dispatch.on_failure(failure(room, failed), NOW) == expected
        assert_empty(dispatch)

    def test_what_another_attempt_would_not_mend(self) -> None:
        dispatch = make()
        room = opened(dispatch)
        fail = dispatch.on_failure(failure(room, DECODE, retryable=False), NOW)[-1]
        assert isinstance(fail, Fail)
        assert fail.cause is Cause.REFUSED

    def test_of_another_start_of_the_replica(self) -> None:
        dispatch = make()
        room = opened(dispatch)
        assert dispatch.on_failure(failure(room, peer_of("decode-0", 2)), NOW) == []
        assert dispatch.dropped == {"foreign": 1}

    def test_of_a_prefill_that_is_done(self) -> None:
        dispatch = make()
        room = opened(dispatch)
        dispatch.on_output(output(room, 0, 9), NOW)
        assert dispatch.on_failure(failure(room, PREFILL), NOW) == []
        assert dispatch.on_lost(PREFILL, NOW) == []
        assert dispatch.is_open(room)

    @pytest.mark.parametrize("lost", [PREFILL, DECODE])
    def test_a_lost_replica(self, lost: Peer) -> None:
        dispatch = make()
        room = opened(dispatch)
        assert dispatch.on_lost(peer_of(lost.replica, 7), NOW) == []
        actions = dispatch.on_lost(lost, NOW)
        assert actions[:2] == [cancel(room, PREFILL), cancel(room, DECODE)]
        reason = f"{lost.replica} was lost before the answer was whole"
        assert actions[2] == Fail(room=room, cause=Cause.REPLICA_LOST, reason=reason)
        assert_empty(dispatch)

    def test_a_submit_that_cannot_be_sent(self) -> None:
        dispatch = make()
        room = opened(dispatch)
        assert dispatch.on_unreachable(room, DECODE.address, "queue full", NOW)[-1] == Fail(
            room=room, cause=Cause.REPLICA_LOST, reason="queue full"
        )
        assert dispatch.on_unreachable(room, DECODE.address, "queue full", NOW) == []
        assert_empty(dispatch)

    def test_deadlines(self) -> None:
        dispatch = make()
        late, early = opened(dispatch, 20.0), opened(dispatch, 10.0)
        assert dispatch.next_deadline_s == 10.0
        assert dispatch.expire(9.9) == []
        fail = dispatch.expire(10.0)[-1]
        assert isinstance(fail, Fail)
        assert (fail.room, fail.cause) == (early, Cause.TIMED_OUT)
        assert dispatch.is_open(late)
        assert dispatch.next_deadline_s == 20.0

    def test_stop_fails_all(self) -> None:
        dispatch = make()
        rooms = {opened(dispatch), opened(dispatch)}
        failed = {action.room for action in dispatch.stop() if isinstance(action, Fail)}
        assert failed == rooms
        assert_empty(dispatch)


class TestAnotherAttempt:
    def test_a_failed_leg_is_avoided_and_the_other_cancelled(self) -> None:
        avoided: list[frozenset[Peer]] = []
        dispatch = make(max_retries=1, avoided=avoided)
        room = opened(dispatch)
        first, place, *submits = dispatch.on_failure(failure(room, PREFILL), NOW)
        assert first == cancel(room, DECODE)
        assert place == Place(room=room, attempt=Room(2), pair=Pair(prefill=PREFILL, decode=DECODE))
        assert [(send.message.room, send.message.num_given) for send in sends_of(submits)] == [(2, 0), (2, 0)]
        assert avoided == [frozenset(), {PREFILL}]
        assert (dispatch.num_retries, dispatch.num_continuations) == (1, 0)
        dispatch.check_integrity()

    def test_it_goes_on_behind_the_tokens_that_the_client_has(self) -> None:
        other = peer_of("decode-1")
        dispatch = make(Pair(prefill=PREFILL, decode=DECODE), Pair(prefill=PREFILL, decode=other), max_retries=1)
        room = opened(dispatch)
        dispatch.on_output(output(room, 0, 9, 8), NOW)
        actions = dispatch.on_lost(DECODE, NOW)
        assert actions[:2] == [cancel(room, PREFILL), cancel(room, DECODE)]
        submit = sends_of(actions[3:])[0].message
        assert isinstance(submit, Submit)
        assert (submit.room, submit.prompt_ids, submit.num_given) == (2, [1, 2, 3, 9, 8], 2)
        assert (submit.sampling, submit.stopping, submit.decode) == (ASK.sampling, ASK.stopping, other)
        assert dispatch.load.of(PREFILL) == Load(num_requests=1, num_tokens=5)
        last = msgspec.structs.replace(output(Room(2), 2, 7, peer=other), cached=CachedTokens(total=4))
        assert dispatch.on_output(last, NOW) == [Emit(room=room, token_ids=[7], finish=None)]
        end = output(Room(2), 3, 6, peer=other, finish=FinishReason.LENGTH)
        assert dispatch.on_output(end, NOW) == [Emit(room=room, token_ids=[6], finish=FinishReason.LENGTH)]
        assert (dispatch.num_retries, dispatch.num_continuations) == (0, 1)
        assert_empty(dispatch)

    def test_what_the_earlier_attempt_still_says_is_late(self) -> None:
        dispatch = make(max_retries=1)
        room = opened(dispatch)
        dispatch.on_failure(failure(room, PREFILL), NOW)
        assert dispatch.on_output(output(room, 0, 9), NOW) == []
        assert dispatch.on_failure(failure(room, DECODE), NOW) == []
        assert dispatch.dropped == {"late": 2}
        assert dispatch.is_open(room)
        assert not dispatch.is_under_way(room)

    def test_a_fault_of_either_leg_speaks_against_both(self) -> None:
        dispatch = make(max_retries=3)
        room = opened(dispatch)
        mutual = msgspec.structs.replace(failure(room, DECODE), mutual=True)
        dispatch.on_failure(mutual, NOW)
        dispatch.on_failure(failure(Room(2), DECODE), NOW)
        assert dispatch.breakers.state(DECODE, NOW) is BreakerState.OPEN
        assert dispatch.breakers.state(PREFILL, NOW) is BreakerState.CLOSED

    def test_the_second_one_waits_and_the_third_twice_as_long(self) -> None:
        dispatch = make(max_retries=3)
        room = opened(dispatch)
        dispatch.on_failure(failure(room, DECODE), NOW)
        assert dispatch.on_failure(failure(Room(2), DECODE), 10.0)[-1] == Wait(until_s=12.0)
        dispatch.check_integrity()
        assert dispatch.load.lines() == {}
        assert dispatch.expire(11.9) == []
        assert dispatch.expire(12.0)[0] == Place(room=room, attempt=Room(3), pair=Pair(prefill=PREFILL, decode=DECODE))
        assert dispatch.on_failure(failure(Room(3), DECODE), 20.0)[-1] == Wait(until_s=24.0)
        dispatch.expire(24.0)
        (*_, fail) = dispatch.on_failure(failure(Room(4), DECODE), 30.0)
        assert fail == Fail(room=room, cause=Cause.REPLICA_FAILED, reason="decode-0: no memory")
        assert_empty(dispatch)

    def test_what_ends_while_it_waits_has_nobody_to_cancel(self) -> None:
        dispatch = make(max_retries=3)
        rooms = [opened(dispatch, 11.0) for _ in range(2)]
        for room in (*rooms, Room(3), Room(4)):
            dispatch.on_failure(failure(room, DECODE), 10.0)
        assert dispatch.on_client_left(rooms[0]) == []
        (fail,) = dispatch.expire(11.0)
        assert isinstance(fail, Fail)
        assert fail.cause is Cause.TIMED_OUT
        assert_empty(dispatch)

    def test_the_last_replica_of_a_role_takes_the_request_with_it(self) -> None:
        dispatch = make(Pair(prefill=PREFILL, decode=DECODE), None, max_retries=3)
        room = opened(dispatch)
        reason = "no replica is ready to go on: decode-0 was lost before the answer was whole"
        assert dispatch.on_lost(DECODE, NOW)[-1] == Fail(room=room, cause=Cause.NO_REPLICA, reason=reason)
        assert (dispatch.num_retries, dispatch.num_continuations) == (0, 0)
        assert_empty(dispatch)

    def test_a_lost_output_is_computed_anew(self) -> None:
        dispatch = make(max_retries=1)
        room = opened(dispatch)
        dispatch.on_output(output(room, 0, 9), NOW)
        sends = sends_of(dispatch.on_output(output(room, 2, 7), NOW))
        assert sends[:2] == [cancel(room, PREFILL), cancel(room, DECODE)]
        assert isinstance(sends[2].message, Submit)
        assert sends[2].message.prompt_ids == [1, 2, 3, 9]


def test_client_left_and_stop_string_cancel_both_legs() -> None:
    dispatch = make()
    left, enough = opened(dispatch), opened(dispatch)
    dispatch.on_output(output(enough, 0, 9), NOW)
    assert dispatch.on_client_left(left) == [cancel(left, PREFILL), cancel(left, DECODE)]
    assert dispatch.on_enough(enough) == [cancel(enough, PREFILL), cancel(enough, DECODE)]
    assert (dispatch.ended[Stage.CANCELLED], dispatch.ended[Stage.FINISHED]) == (1, 1)
    assert_empty(dispatch)


def test_no_move_leaves_an_end() -> None:
    assert set(MOVES) == set(Stage)
    for end in ENDS:
        for stage in Stage:
            with pytest.raises(IllegalTransitionError, match=f"room 5: late would move {end.name}"):
                move(MOVES, end, stage, "late", "room 5")


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
        config = RouterConfig(max_retries=max_retries, breaker_failures=2)
        self.dispatch = Dispatch(
            ME, config, LoadBook(), Breakers(2, 10.0), lambda *_: self._pair(), draw=lambda: Room(next(rooms))
        )
        self.duties = Duties()
        self.attempts: dict[Room, Room] = {}
        """Names of the requests by room."""
        self.ends: dict[Room, int] = {}
        self.received: dict[Room, list[int]] = {}

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
            if isinstance(action, Place):
                self.attempts[action.attempt] = action.room
            if isinstance(action, Emit):
                self.received[action.room] += action.token_ids
                assert self.received[action.room] == list(range(len(self.received[action.room])))
            if isinstance(action, Fail) or (isinstance(action, Emit) and action.finish):
                self._count_end(action.room)

    def _pair(self) -> Pair | None:
        pair = Pair(prefill=self.rng.choice(self.peers[:2]), decode=self.rng.choice(self.peers[2:]))
        return pair if self.rng.random() < 0.9 else None

    def _count_end(self, room: Room) -> None:
        self.ends[room] = self.ends.get(room, 0) + 1

    def _any_room(self) -> Room:
        """Of an attempt, mostly of one of the newest."""
        return self.rng.choice([*list(self.attempts)[-8:], *self.attempts, Room(10**6)])

    def _open(self) -> None:
        ask = Ask(prompt_ids=[0] * self.rng.randint(1, 5), sampling=Sampling(), stopping=Stopping(max_tokens=6))
        room, actions = self.dispatch.open(ask, self.now_s + self.rng.uniform(0, 100), self.now_s)
        self.received[room] = []
        self.take(actions)

    def _output(self) -> None:
        first, length = self.rng.randint(0, 5), self.rng.randint(0, 3)
        room = self._any_room()
        given = self.received.get(self.attempts.get(room, Room(0)), [])
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
        room = self.attempts.get(self._any_room(), Room(0))
        if self.dispatch.is_open(room):
            self.take(self.dispatch.on_client_left(room))
            self._count_end(room)

    def _expire(self) -> None:
        self.take(self.dispatch.expire(self.now_s))


def test_ids_are_not_confused_between_starts() -> None:
    old, new = peer_of("decode-0", 1), peer_of("decode-0", 2)
    dispatch = make(*[Pair(prefill=PREFILL, decode=decode) for decode in (old, new)])
    dispatch.open(ASK, 1.0, NOW)
    dispatch.open(ASK, 1.0, NOW)
    lines = dispatch.load.lines()
    assert lines[ReplicaId("decode-0"), Incarnation(1)] == lines[ReplicaId("decode-0"), Incarnation(2)]
    dispatch.on_lost(old, NOW)
    assert dispatch.num_open == 1
