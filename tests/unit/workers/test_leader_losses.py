"""Leaders' reactions to refused requests and to lost processes."""

from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
from msgspec.structs import replace

from cluster.spec.hicache_config import HicacheConfig
from cluster.spec.ids import ROUTER, Incarnation, Role, Room
from cluster.spec.kv import page_keys
from cluster.spec.messages import Cancel, Failure, Message
from cluster.spec.phases import ComputedStep
from cluster.spec.sampling import Sampled
from cluster.spec.step_messages import ForgetPeer
from cluster.spec.transfer_messages import Accepted, Drained, Refused, Ticket
from tests.fakes.leader_pair import PROMPT, LeaderPair
from tests.fakes.paged_ranks import PAGE_SIZE, record
from tests.fakes.pages import allocate
from workers.cache.page_allocator import PageAllocator
from workers.cache.prefix_tree import PrefixTree
from workers.context_parallel.strategy_chooser import undivided
from workers.hicache.tiers import Tiers
from workers.scheduler.decode import DecodeLeader
from workers.scheduler.step_scheduler import StepLimits, StepScheduler


def tickets_of(pair: LeaderPair, *messages: Message) -> list[Room]:
    """Return the rooms for which decode issues tickets when these messages arrive, in order."""
    return [said.room for said in pair.deliver(Role.DECODE, *messages) if isinstance(said, Ticket)]


def drained(pair: LeaderPair, room: Room) -> tuple[Message, ...]:
    """Cancel the request and report that prefill has drained."""
    incarnation = Incarnation(1)
    said = Drained(room=room, prefill=pair.prefill_peer, decode_incarnation=incarnation)
    return Cancel(room=room, incarnation=incarnation), said


@pytest.mark.parametrize("role", Role)
def test_a_prompt_larger_than_the_pool_is_refused_with_a_reason(role: Role) -> None:
    pair = LeaderPair(4)
    (failure,) = pair.deliver(role, pair.submit([1] * 17))
    assert isinstance(failure, Failure)
    assert failure.reason == f"the prompt needs 5 pages, but {role}-0 has 4"
    assert pair.leaders[role].is_idle()


def test_pages_are_shared_only_under_the_same_salt() -> None:
    pair = LeaderPair()
    allocator = pair.allocators[Role.DECODE]
    allocator.keep([allocate(allocator, 4)], page_keys(PROMPT, PAGE_SIZE, "a"))
    submits = [pair.submit(PROMPT, cache_salt=salt) for salt in ("", "a", "b")]
    tickets = [said for said in pair.deliver(Role.DECODE, *submits) if isinstance(said, Ticket)]
    assert [ticket.num_held_pages for ticket in tickets] == [0, 4, 0]


def test_short_prompts_pass_a_long_one_that_waits_for_decode_pages_until_as_many_passed_as_it_wants() -> None:
    pair = LeaderPair(20, prefix_cache=False)
    longs = pair.submit([1] * 10 * PAGE_SIZE), pair.submit([2] * 12 * PAGE_SIZE)
    assert tickets_of(pair, *longs) == [longs[0].room]
    for _ in range(6):
        short = pair.submit([3] * 2 * PAGE_SIZE)
        assert tickets_of(pair, short) == [short.room]
        pair.deliver(Role.DECODE, *drained(pair, short.room))
    assert tickets_of(pair, pair.submit([3] * 2 * PAGE_SIZE)) == []


def test_an_urgent_request_gets_decode_pages_first_and_the_oldest_is_not_starved() -> None:
    pair = LeaderPair(10, prefix_cache=False)
    first = pair.submit([1] * 10 * PAGE_SIZE)
    assert tickets_of(pair, first) == [first.room]
    usual, urgent, *others = (pair.submit([2] * 8 * PAGE_SIZE, priority=priority) for priority in (0, -1, -1, -1))
    assert tickets_of(pair, usual, urgent, *others) == []
    order = [room for ended in (first, urgent, usual) for room in tickets_of(pair, *drained(pair, ended.room))]
    assert order == [urgent.room, usual.room, others[0].room]


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_waiting_requests_are_not_examined_before_pages_are_freed(
    prefix_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = LeaderPair(4, prefix_cache=prefix_cache)
    submits = [pair.submit([number, 1], 2) for number in range(4 + 768)]
    rooms = [submit.room for submit in submits]
    assert tickets_of(pair, *submits) == rooms[:4]
    decode, looks = pair.decode, Counter[str]()
    decode.tick(0.0)  # looks at the four after those that it has looked at
    for name in ("find", "can_allocate"):
        look = partial(count_call, looks, name, getattr(pair.allocators[Role.DECODE], name))
        monkeypatch.setattr(pair.allocators[Role.DECODE], name, look)

    decode.tick(0.0)
    decode.on_message(Cancel(room=rooms[-1], incarnation=Incarnation(1)), 0.0)
    assert not looks
    assert tickets_of(pair, pair.submit([1, 2], 2)) == []
    assert not looks, "behind as many as are looked at"
    urgent = pair.submit([1, 3], 2, priority=-1)
    assert tickets_of(pair, urgent) == []
    assert looks["find"] == 1
    assert tickets_of(pair, *drained(pair, rooms[0])) == [urgent.room]
    assert looks["find"] <= 1 + 256


def count_call(calls: Counter[str], name: str, call: Callable[..., object], *args: object) -> object:
    calls[name] += 1
    return call(*args)


def test_pages_are_freed_when_router_and_prefill_are_both_proven_gone() -> None:
    pair = LeaderPair()
    decode = pair.decode
    pair.deliver(Role.DECODE, pair.submit(PROMPT))
    reaped = {ROUTER: Incarnation(1)}
    decode.on_message(pair.table(reaped), 0.0)
    assert not decode.is_idle(), "prefill has a ticket and may write"
    reaped[pair.prefill_peer.replica] = Incarnation(0)
    decode.on_message(pair.table(reaped), 0.0)
    decode.tick(1.0)
    assert not decode.is_idle(), "an earlier incarnation's end proves nothing"
    reaped[pair.prefill_peer.replica] = Incarnation(1)
    decode.on_message(pair.table(reaped), 1.0)
    decode.tick(2.0)
    assert decode.is_idle()
    decode.check_integrity()


def test_ranks_are_notified_once_of_a_lost_decode_replica() -> None:
    pair = LeaderPair()
    prefill = pair.prefill
    for _ in range(2):
        reaped = {pair.decode_peer.replica: Incarnation(1)}
        prefill.on_message(pair.table(reaped), 0.0)
    reported = [message for _, message in prefill.outgoing if isinstance(message, ForgetPeer)]
    assert reported == [ForgetPeer(replica=pair.decode_peer.replica, incarnation=Incarnation(1))] * 2


def test_too_much_quarantine_ends_the_replica_when_idle() -> None:
    """Prefill never answers the Revoke. Time alone does not free pages, but restarting the replica provides new ones.

    The half second in which bytes settle has passed.
    """
    pair = LeaderPair(num_pages=10)
    decode = pair.decode
    submits = [pair.submit([1] * 3 * PAGE_SIZE) for _ in range(2)]
    pair.deliver(Role.DECODE, *submits)
    decode.on_message(Cancel(room=submits[0].room, incarnation=Incarnation(1)), 0.0)
    assert decode.load().stopping_pages == 3
    decode.tick(60.0)
    assert (decode.load().quarantined_pages, decode.load().draining) == (0, False)
    decode.tick(60.5)
    assert (decode.load().quarantined_pages, decode.load().draining, decode.must_end) == (3, True, "")
    assert decode.load().stopping_pages == 3
    decode.on_message(Cancel(room=submits[1].room, incarnation=Incarnation(1)), 60.5)
    decode.tick(61.0)
    assert decode.must_end == ""
    decode.tick(121.0)
    assert decode.must_end == (
        "6 of 10 pages are in quarantine, more than 25% of the pool: prefill-0 did not confirm that writing has stopped"
    )


@pytest.mark.parametrize(
    ("cancelled_pages", "reason"),
    [
        (3, "3 of 10 pages are in quarantine, more than 25% of the pool: "),
        (2, "2 of 10 pages are in quarantine, and a request is waiting for them: "),
    ],
)
def test_requests_that_wait_for_pages_in_quarantine_do_not_keep_the_replica(cancelled_pages: int, reason: str) -> None:
    pair = LeaderPair(num_pages=10)
    decode = pair.decode
    first, second = pair.submit([1] * cancelled_pages * PAGE_SIZE), pair.submit([1] * 9 * PAGE_SIZE)
    pair.deliver(Role.DECODE, first, second)
    decode.on_message(Cancel(room=first.room, incarnation=Incarnation(1)), 0.0)
    decode.tick(60.0)
    assert (decode.load().num_waiting, decode.must_end) == (1, "")
    decode.tick(60.5)
    assert decode.must_end.startswith(reason)


def test_pages_that_are_proven_free_in_time_let_the_replica_take_requests_again() -> None:
    pair = LeaderPair(num_pages=10)
    decode = pair.decode
    first, second = (pair.submit([1] * 3 * PAGE_SIZE) for _ in range(2))
    pair.deliver(Role.DECODE, first, second)
    decode.on_message(Cancel(room=first.room, incarnation=Incarnation(1)), 0.0)
    decode.tick(60.5)
    assert decode.load().draining
    reaped = {pair.prefill_peer.replica: Incarnation(1)}
    decode.on_message(pair.table(reaped), 61.0)
    decode.tick(62.0)
    assert (decode.load().quarantined_pages, decode.load().draining, decode.must_end) == (0, False, "")
    assert decode.load().stopping_pages == 0


def test_pages_that_are_proven_free_while_another_dp_rank_works_do_not_end_the_replica() -> None:
    pair = LeaderPair(num_pages=10)
    decode = pair.decode
    first, second = (pair.submit([1] * 3 * PAGE_SIZE) for _ in range(2))
    pair.deliver(Role.DECODE, first)
    decode.on_message(Cancel(room=first.room, incarnation=Incarnation(1)), 0.0)
    decode.tick(60.5)
    assert decode.must_end
    pair.deliver(Role.DECODE, drained(pair, first.room)[1], now_s=61.0)
    assert decode.must_end == ""
    pair.deliver(Role.DECODE, second, now_s=62.0)
    assert (decode.is_idle(), decode.must_end) == (False, "")


def test_a_request_that_waits_for_storage_does_not_end_a_replica_with_pages_in_quarantine() -> None:
    pair, tree = LeaderPair(), PrefixTree()
    config = HicacheConfig.model_validate({"storage": {"backend": "files", "prefetch": "timeout"}})
    tiers = Tiers(config, tree, 16, [record(Role.DECODE, 0, 1, 40)])
    tiers.prefetcher.min_tokens = 1
    limits = StepLimits(PAGE_SIZE, 16, 4)
    steps = StepScheduler(PageAllocator(40, tree), limits, undivided, tiers=tiers)
    pair.leaders[Role.DECODE] = decode = DecodeLeader(pair._decode_settings(), steps)
    received, own = pair.submit([1] * PAGE_SIZE), replace(pair.submit(PROMPT), prefill=None)
    pair.deliver(Role.DECODE, received)
    pair.deliver(Role.DECODE, Cancel(room=received.room, incarnation=Incarnation(1)))
    pair.deliver(Role.DECODE, own, now_s=100.0)
    load = decode.load()
    assert (load.quarantined_pages, load.num_waiting, load.free_pages) == (1, 1, 39)
    assert decode.must_end == ""
    pair.deliver(Role.DECODE, now_s=110.0)
    assert decode.next_plan() is not None


def test_a_request_that_waits_for_a_step_does_not_end_a_replica_with_pages_in_quarantine() -> None:
    """No more steps can start until the step of a cancelled request has ended."""
    pair = LeaderPair()
    decode = pair.decode
    received, first, second = pair.submit([1] * PAGE_SIZE), pair.submit(PROMPT), pair.submit(PROMPT)
    pair.deliver(Role.DECODE, received, replace(first, prefill=None))
    plan = decode.next_plan()
    assert plan is not None
    pair.deliver(Role.DECODE, Cancel(room=received.room, incarnation=Incarnation(1)))
    cancel = Cancel(room=first.room, incarnation=Incarnation(1))
    pair.deliver(Role.DECODE, replace(second, prefill=None), cancel, now_s=100.0)
    assert decode.load().quarantined_pages == 1
    assert decode.must_end == ""
    decode.commit(plan, {first.room: Sampled(token_id=1)}, ComputedStep(0.0, 100.0, 0.0))
    assert decode.next_plan() is not None


def test_a_ticket_without_a_request_reports_the_missing_message_and_the_wait() -> None:
    pair = LeaderPair(num_pages=10)
    prefill = pair.prefill
    (ticket,) = [said for said in pair.deliver(Role.DECODE, pair.submit(PROMPT)) if isinstance(said, Ticket)]
    prefill.on_message(ticket, 0.0)
    prefill.tick(1.0)
    prefill.tick(100.0)
    assert prefill.outgoing == [], "a stalled prefill may not have read the request yet"
    for now_s in range(100, 130):
        prefill.tick(float(now_s))
    (refused,) = [message for _, message in prefill.outgoing if isinstance(message, Refused)]
    assert refused.reason == "the request itself did not arrive from the router within 30 s"


def test_a_repeated_ticket_is_answered_while_its_request_waits() -> None:
    pair = LeaderPair(num_pages=10)
    submit = pair.submit(PROMPT)
    (ticket,) = [said for said in pair.deliver(Role.DECODE, submit) if isinstance(said, Ticket)]
    first = pair.deliver(Role.PREFILL, submit, ticket)
    assert not any(isinstance(said, Accepted) for said in first)
    (accepted,) = pair.deliver(Role.PREFILL, ticket)
    assert accepted == Accepted(room=submit.room, prefill=pair.prefill_peer, decode_incarnation=Incarnation(1))
    assert pair.deliver(Role.DECODE, accepted) == []
    assert pair.decode.load().dropped == {}
