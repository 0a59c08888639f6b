"""A replica's failure stops the other replica of the attempt, and the request is retried while attempts remain."""

import msgspec
import pytest

from cluster.spec.ids import Peer, Room
from cluster.spec.messages import INQUIRE_EVERY_S, Blame
from cluster.spec.sampling import FinishReason
from cluster.spec.tiers import CachedTokens
from router.directory import BreakerState, Load
from router.request import Action, Cause, FailRequest, OutputBatch, WakeAt
from tests.fakes.bootstrap import peer_of
from tests.fakes.dispatching import (
    DECODE,
    NOW,
    PREFILL,
    ask,
    assert_empty,
    cancel,
    failure,
    make,
    on,
    opened,
    output,
    peers_started,
    started_of,
)


class TestFailures:
    @pytest.mark.parametrize(("failed", "other"), [(PREFILL, DECODE), (DECODE, PREFILL)])
    def test_the_other_replica_is_cancelled(self, failed: Peer, other: Peer) -> None:
        dispatch = make()
        room = opened(dispatch)
        reason = f"{failed.replica}: no memory"
        fail = FailRequest(choice_id=room, cause=Cause.REPLICA_FAILED, reason=reason)
        expected: list[Action] = [cancel(room, other), fail]
        assert dispatch.on_failure(failure(room, failed), NOW) == expected
        assert_empty(dispatch)

    @pytest.mark.parametrize(("blame", "cause"), [(Blame.SENDER, Cause.REFUSED), (Blame.MODEL, Cause.CORRUPTED)])
    def test_permanent_errors_are_not_retried(self, blame: Blame, cause: Cause) -> None:
        dispatch = make()
        room = opened(dispatch)
        fail = dispatch.on_failure(msgspec.structs.replace(failure(room, DECODE, retryable=False), blame=blame), NOW)[
            -1
        ]
        assert isinstance(fail, FailRequest)
        assert fail.cause is cause

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
        reason = f"{lost.replica} was lost before the answer was complete"
        assert actions[2] == FailRequest(choice_id=room, cause=Cause.REPLICA_LOST, reason=reason)
        assert_empty(dispatch)

    def test_a_submit_that_cannot_be_sent(self) -> None:
        dispatch = make()
        room = opened(dispatch)
        assert dispatch.on_unreachable(Room(room), DECODE.address, "queue full", NOW)[-1] == FailRequest(
            choice_id=room, cause=Cause.REPLICA_LOST, reason="queue full"
        )
        assert dispatch.on_unreachable(Room(room), DECODE.address, "queue full", NOW) == []
        assert_empty(dispatch)

    def test_deadlines(self) -> None:
        dispatch = make()
        late, early = opened(dispatch, 20.0), opened(dispatch, 9.0)
        assert dispatch.next_deadline_s == 9.0
        assert dispatch.expire(8.9) == []
        fail = dispatch.expire(9.0)[-1]
        assert isinstance(fail, FailRequest)
        assert (fail.choice_id, fail.cause) == (early, Cause.TIMED_OUT)
        assert dispatch.is_open(late)
        assert dispatch.next_deadline_s == NOW + INQUIRE_EVERY_S

    def test_stop_fails_all(self) -> None:
        dispatch = make()
        rooms = {opened(dispatch), opened(dispatch)}
        failed = {action.choice_id for action in dispatch.stop() if isinstance(action, FailRequest)}
        assert failed == rooms
        assert_empty(dispatch)


class TestAnotherAttempt:
    def test_a_failed_replica_is_avoided_and_the_other_cancelled(self) -> None:
        avoided: list[frozenset[Peer]] = []
        dispatch = make(max_retries=1, avoided=avoided)
        room = opened(dispatch)
        first, *others = dispatch.on_failure(failure(room, PREFILL), NOW)
        assert first == cancel(room, DECODE)
        submit = started_of(others)
        assert (submit.room, submit.num_given) == (2, 0)
        assert avoided == [frozenset(), {PREFILL}]
        assert (dispatch.num_restarts, dispatch.num_continuations) == (1, 0)
        dispatch.check_integrity()

    def test_a_retry_continues_after_the_clients_tokens(self) -> None:
        other = peer_of("decode-1")
        dispatch = make(on(), on(other), max_retries=1)
        room = opened(dispatch)
        dispatch.on_output(output(room, 0, 9, 8), NOW)
        actions = dispatch.on_lost(DECODE, NOW)
        assert actions[:2] == [cancel(room, PREFILL), cancel(room, DECODE)]
        submit = started_of(actions)
        assert (submit.room, [*submit.prompt_ids], submit.num_given) == (2, [1, 2, 3, 9, 8], 2)
        assert (submit.sampling, submit.stopping, submit.decode) == (ask().sampling, ask().stopping, other)
        assert dispatch.load.of(PREFILL) == Load(num_requests=1, num_tokens=5)
        last = msgspec.structs.replace(output(Room(2), 2, 7, peer=other), cached=CachedTokens(total=4))
        assert dispatch.on_output(last, NOW) == [OutputBatch(choice_id=room, token_ids=[7])]
        end = output(Room(2), 3, 6, peer=other, finish=FinishReason.LENGTH)
        assert dispatch.on_output(end, NOW) == [OutputBatch(choice_id=room, token_ids=[6], finish=FinishReason.LENGTH)]
        assert (dispatch.num_restarts, dispatch.num_continuations) == (0, 1)
        assert_empty(dispatch)

    def test_late_messages_of_an_earlier_attempt_are_ignored(self) -> None:
        dispatch = make(max_retries=1)
        room = opened(dispatch)
        dispatch.on_failure(failure(room, PREFILL), NOW)
        assert dispatch.on_output(output(room, 0, 9), NOW) == []
        assert dispatch.on_failure(failure(room, DECODE), NOW) == []
        assert dispatch.dropped == {"late": 2}
        assert dispatch.is_open(room)
        assert not dispatch.is_under_way(Room(room))

    def test_a_fault_of_either_target_counts_against_both(self) -> None:
        dispatch = make(max_retries=3)
        room = opened(dispatch)
        dispatch.on_failure(msgspec.structs.replace(failure(room, DECODE), blame=Blame.BOTH), NOW)
        dispatch.on_failure(failure(Room(2), DECODE), NOW)
        assert dispatch.breakers.state(DECODE, NOW) is BreakerState.OPEN
        assert dispatch.breakers.state(PREFILL, NOW) is BreakerState.CLOSED

    def test_a_neutral_failure_excludes_no_replica(self) -> None:
        dispatch = make(max_retries=3)
        room = opened(dispatch)
        for number in (room, Room(2)):
            dispatch.on_failure(msgspec.structs.replace(failure(number, DECODE), blame=Blame.NEITHER), NOW)
        assert peers_started(dispatch.expire(NOW + 2.0)) == [PREFILL, DECODE]
        assert dispatch.breakers.state(DECODE, NOW) is BreakerState.CLOSED
        assert dispatch.breakers.state(PREFILL, NOW) is BreakerState.CLOSED

    def test_the_second_one_waits_and_the_third_twice_as_long(self) -> None:
        dispatch = make(max_retries=3)
        room = opened(dispatch)
        dispatch.on_failure(failure(room, DECODE), NOW)
        assert dispatch.on_failure(failure(Room(2), DECODE), 10.0)[-1] == WakeAt(time_s=12.0)
        dispatch.check_integrity()
        assert dispatch.load.lines() == {}
        assert dispatch.expire(11.9) == []
        assert started_of(dispatch.expire(12.0)).room == Room(3)
        assert dispatch.on_failure(failure(Room(3), DECODE), 20.0)[-1] == WakeAt(time_s=24.0)
        dispatch.expire(24.0)
        (*_, fail) = dispatch.on_failure(failure(Room(4), DECODE), 30.0)
        assert fail == FailRequest(choice_id=room, cause=Cause.REPLICA_FAILED, reason="decode-0: no memory")
        assert_empty(dispatch)

    def test_a_waiting_request_ends_without_cancels(self) -> None:
        dispatch = make(max_retries=3)
        rooms = [opened(dispatch, 11.0) for _ in range(2)]
        for room in (*rooms, Room(3), Room(4)):
            dispatch.on_failure(failure(room, DECODE), 10.0)
        assert dispatch.on_client_left(rooms[0]) == []
        (fail,) = dispatch.expire(11.0)
        assert isinstance(fail, FailRequest)
        assert fail.cause is Cause.TIMED_OUT
        assert_empty(dispatch)

    def test_the_last_replica_of_a_role_takes_the_request_with_it(self) -> None:
        dispatch = make(on(), None, max_retries=3)
        room = opened(dispatch)
        reason = "no replica is ready for another attempt: decode-0 was lost before the answer was complete"
        assert dispatch.on_lost(DECODE, NOW)[-1] == FailRequest(choice_id=room, cause=Cause.NO_REPLICA, reason=reason)
        assert (dispatch.num_restarts, dispatch.num_continuations) == (0, 0)
        assert_empty(dispatch)

    def test_a_lost_output_is_recomputed(self) -> None:
        dispatch = make(max_retries=1)
        room = opened(dispatch)
        dispatch.on_output(output(room, 0, 9), NOW)
        actions = dispatch.on_output(output(room, 2, 7), NOW)
        assert actions[:2] == [cancel(room, PREFILL), cancel(room, DECODE)]
        assert [*started_of(actions).prompt_ids] == [1, 2, 3, 9]
