"""Request table with replica pairs, and the messages that it sends."""

import itertools
from collections.abc import Sequence

from cluster.spec.ids import ROUTER, Incarnation, Peer, Room
from cluster.spec.messages import Cancel, Failure, Output, Submit
from cluster.spec.sampling import FinishReason, Sampling, Stopping
from cluster.spec.wire import TokenIds
from router.directory import Breakers, LoadBook
from router.dispatch import RequestTable
from router.request import Action, ChoiceId, GenerateRequest, Placement, SendMessage, StartAttempt, peers_of
from tests.fakes.bootstrap import peer_of

PREFILL, DECODE = peer_of("prefill-0"), peer_of("decode-0")
ME = Peer(replica=ROUTER, incarnation=Incarnation(1), address="tcp://router:1")
NOW = 5.0


def ask(sampling: Sampling | None = None, dp_rank: int | None = None) -> GenerateRequest:
    return GenerateRequest(
        prompt_ids=TokenIds.of([1, 2, 3]),
        sampling=sampling or Sampling(),
        stopping=Stopping(max_tokens=4),
        dp_rank=dp_rank,
    )


def on(decode: Peer = DECODE, cached_tokens: int = 0) -> Placement:
    return Placement(prefill=PREFILL, decode=decode, cached_tokens=cached_tokens)


def make(
    *picks: Placement | None,
    max_retries: int = 0,
    avoided: list[frozenset[Peer]] | None = None,
    max_unanswered: int = 60,
) -> RequestTable:
    """Return a table that gets these picks, then always the same pair. ``avoided`` collects the avoided peers."""
    rooms, coming = itertools.count(1), iter(picks)

    def pick(_request: GenerateRequest, _room: Room, shunned: frozenset[Peer], _now_s: float) -> Placement | None:
        if avoided is not None:
            avoided.append(shunned)
        return next(coming, on())

    breakers = Breakers(max_failures=2)
    return RequestTable(
        ME,
        LoadBook(),
        breakers,
        pick,
        lambda: Room(next(rooms)),
        max_retries,
        retry_backoff_s=2.0,
        max_unanswered=max_unanswered,
    )


def opened(dispatch: RequestTable, deadline_s: float = 100.0) -> ChoiceId:
    choice_id, _ = dispatch.open(ask(), deadline_s, NOW)
    return choice_id


def output(room: int, first: int, *tokens: int, peer: Peer = DECODE, finish: FinishReason | None = None) -> Output:
    return Output(
        room=Room(room),
        replica=peer.replica,
        incarnation=peer.incarnation,
        first_index=first,
        token_ids=list(tokens),
        finish=finish,
    )


def failure(room: int, peer: Peer, retryable: bool = True) -> Failure:
    return Failure(
        room=Room(room), replica=peer.replica, incarnation=peer.incarnation, reason="no memory", retryable=retryable
    )


def cancel(room: int, peer: Peer) -> SendMessage:
    return SendMessage(address=peer.address, message=Cancel(room=Room(room), incarnation=peer.incarnation))


def started_of(actions: Sequence[Action]) -> Submit:
    """Return the Submit of the only attempt that starts."""
    (submit,) = [action.submit for action in actions if isinstance(action, StartAttempt)]
    return submit


def peers_started(actions: Sequence[Action]) -> list[Peer]:
    return peers_of(started_of(actions))


def assert_empty(dispatch: RequestTable) -> None:
    dispatch.check_integrity()
    assert dispatch.num_open == 0
    assert dispatch.load.lines() == {}
    assert dispatch.next_deadline_s is None
