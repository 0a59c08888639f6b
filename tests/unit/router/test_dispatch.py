"""Life cycle of a request, event by event."""

import msgspec
import pytest

from cluster.spec.errors import IllegalTransitionError, move
from cluster.spec.ids import Incarnation, Peer, ReplicaId, Room
from cluster.spec.messages import Output
from cluster.spec.sampling import FinishReason, Sampling, TokenLogprobs
from router.directory import Load
from router.request import ENDS, MOVES, Cause, FailRequest, OutputBatch, RequestPhase
from tests.fakes.bootstrap import peer_of
from tests.fakes.dispatching import (
    DECODE,
    ME,
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


def test_open_sends_a_submit_to_both_leaders() -> None:
    dispatch = make()
    room, actions = dispatch.open(ask(), 1.0, NOW)
    assert peers_started(actions) == [PREFILL, DECODE]
    submit = started_of(actions)
    assert (submit.room, submit.router, [*submit.prompt_ids]) == (Room(room), ME, [1, 2, 3])
    assert submit.dp_rank is None


def test_the_dp_rank_that_a_client_wants_reaches_the_leaders() -> None:
    _, actions = make().open(ask(dp_rank=1), 1.0, NOW)
    assert started_of(actions).dp_rank == 1


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


def test_tokens_cached_on_prefill_are_no_load() -> None:
    dispatch = make(on(cached_tokens=2))
    room, _ = dispatch.open(ask(), 1.0, NOW)
    assert dispatch.load.of(PREFILL) == Load(num_requests=1, num_tokens=1)
    dispatch.check_integrity()
    dispatch.on_output(output(room, 0, 9), NOW)
    dispatch.on_client_left(room)
    assert_empty(dispatch)


def test_a_further_choice_is_load_on_decode_only() -> None:
    dispatch = make()
    first = opened(dispatch)
    room, actions = dispatch.open(ask(), 1.0, NOW, first_choice=first)
    submit = started_of(actions)
    assert (submit.decode, submit.prefill, submit.prompt_of) == (DECODE, None, Room(first))
    assert dispatch.load.of(PREFILL) == Load(num_requests=1, num_tokens=3)
    assert dispatch.load.of(DECODE) == Load(num_requests=2, num_tokens=7 + 4)
    dispatch.check_integrity()
    dispatch.on_output(output(room, 0, 9), NOW)
    assert dispatch.on_client_left(room) == [cancel(room, DECODE)]
    assert dispatch.load.of(PREFILL) == Load(num_requests=1, num_tokens=3)
    dispatch.on_client_left(first)
    assert_empty(dispatch)


def test_a_further_choice_is_tried_again_with_a_prefill_of_its_own() -> None:
    dispatch = make(max_retries=1)
    room, _ = dispatch.open(ask(), 100.0, NOW, first_choice=opened(dispatch))
    submit = started_of(dispatch.on_failure(failure(room, DECODE), NOW))
    assert (submit.prefill, submit.decode, submit.prompt_of) == (PREFILL, DECODE, None)
    assert dispatch.load.of(DECODE) == Load(num_requests=2, num_tokens=14)
    dispatch.check_integrity()


def test_tokens_are_emitted_in_order_and_the_last_ends_the_request() -> None:
    dispatch = make()
    room = opened(dispatch)
    assert dispatch.on_output(output(room, 0, 9), NOW) == [OutputBatch(choice_id=room, token_ids=[9])]
    last = output(room, 1, 8, 7, finish=FinishReason.LENGTH)
    assert dispatch.on_output(last, NOW) == [OutputBatch(choice_id=room, token_ids=[8, 7], finish=FinishReason.LENGTH)]
    assert_empty(dispatch)
    assert dispatch.ended[RequestPhase.FINISHED] == 1


def test_an_end_without_tokens() -> None:
    dispatch = make()
    room = opened(dispatch)
    dispatch.on_output(output(room, 0, 9), NOW)
    last = output(room, 1, finish=FinishReason.STOP)
    assert dispatch.on_output(last, NOW) == [OutputBatch(choice_id=room, token_ids=[], finish=FinishReason.STOP)]


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
        assert dispatch.on_output(output(room, 1, 8, 7), NOW) == [OutputBatch(choice_id=room, token_ids=[7])]

    @pytest.mark.parametrize(
        ("message", "reason"),
        [
            (output(Room(1), 2, 7), "decode-0: output 1 is missing; 2 arrived instead"),
            (output(Room(1), 0, 6, 7), "decode-0: output 0 was sent again with different tokens"),
            (output(Room(1), 1, 1, 2, 3, 4), "decode-0: got 5 tokens, but at most 4 were requested"),
            (output(Room(1), 0, finish=FinishReason.STOP), "decode-0: the answer ended at 0 tokens, but 1 had arrived"),
        ],
    )
    def test_an_impossible_index_fails_the_request(self, message: Output, reason: str) -> None:
        dispatch = make()
        room = opened(dispatch)
        dispatch.on_output(output(room, 0, 9), NOW)
        assert dispatch.on_output(message, NOW) == [
            cancel(room, PREFILL),
            cancel(room, DECODE),
            FailRequest(choice_id=room, cause=Cause.BROKEN_OUTPUT, reason=reason),
        ]
        assert_empty(dispatch)

    def test_logprobs_stay_with_their_tokens(self) -> None:
        dispatch = make()
        room, _ = dispatch.open(ask(Sampling(num_logprobs=0)), 100.0, NOW)
        reported = [TokenLogprobs(logprob=-index, top_ids=[], top_logprobs=[]) for index in range(3)]
        dispatch.on_output(msgspec.structs.replace(output(room, 0, 9, 8), logprobs=reported[:2]), NOW)
        (emit,) = dispatch.on_output(msgspec.structs.replace(output(room, 1, 8, 7), logprobs=reported[1:]), NOW)
        assert emit == OutputBatch(choice_id=room, token_ids=[7], logprobs=[reported[2]])
        fail = dispatch.on_output(output(room, 3, 6), NOW)[-1]
        assert isinstance(fail, FailRequest)
        assert fail.reason == "decode-0: 1 tokens arrived with log-probabilities for 0"

    @pytest.mark.parametrize("peer", [PREFILL, peer_of("decode-0", 2), peer_of("decode-1")])
    def test_outputs_from_other_senders_are_ignored(self, peer: Peer) -> None:
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


def test_disconnects_and_stop_strings_cancel_both_replicas() -> None:
    dispatch = make()
    left, stopped = opened(dispatch), opened(dispatch)
    dispatch.on_output(output(stopped, 0, 9), NOW)
    assert dispatch.on_client_left(left) == [cancel(left, PREFILL), cancel(left, DECODE)]
    assert dispatch.stop_early(stopped) == [cancel(stopped, PREFILL), cancel(stopped, DECODE)]
    assert (dispatch.ended[RequestPhase.CANCELLED], dispatch.ended[RequestPhase.FINISHED]) == (1, 1)
    assert_empty(dispatch)


def test_no_event_changes_an_ended_request() -> None:
    assert set(MOVES) == set(RequestPhase)
    for end in ENDS:
        for stage in RequestPhase:
            with pytest.raises(IllegalTransitionError, match=f"request 5: late would move {end.name}"):
                move(MOVES, end, stage, "late", "request 5")


def test_ids_are_not_confused_between_starts() -> None:
    old, new = peer_of("decode-0", 1), peer_of("decode-0", 2)
    dispatch = make(on(old), on(new))
    dispatch.open(ask(), 1.0, NOW)
    dispatch.open(ask(), 1.0, NOW)
    lines = dispatch.load.lines()
    assert lines[ReplicaId("decode-0"), Incarnation(1)] == lines[ReplicaId("decode-0"), Incarnation(2)]
    dispatch.on_lost(old, NOW)
    assert dispatch.num_open == 1
