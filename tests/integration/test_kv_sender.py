"""One rank's sender over the real channel: cached pages are sent before the step, pages that decode holds are not."""

from collections.abc import Iterator
from contextlib import closing
from functools import partial

import msgspec
import pytest
from msgspec.structs import asdict, replace

from cluster.channel import Inbox, Outbox
from cluster.spec.config import TransferConfig
from cluster.spec.ids import Incarnation, Peer, Role, Room
from cluster.spec.messages import Message
from cluster.spec.registry import KvOwnership, RankRecord, Verify
from cluster.spec.sampling import Sampling
from cluster.spec.step_messages import (
    CancelSend,
    Destination,
    ForgetPeer,
    NewRequest,
    ScheduledRequest,
    SendReport,
    StepPlan,
    StepShape,
)
from cluster.spec.transfer_messages import CheckPages, Done, PagesChecked, SendState
from tests.fakes.loopback import Loopback
from tests.fakes.paged_ranks import PAGE_SIZE, record
from transfer.backends.interface import Region
from transfer.page_range import coverage_problem
from transfer.sender import SenderThread
from workers.handoff.kv_sender import KvSender
from workers.handoff.page_checker import PageChecker

pytestmark = pytest.mark.integration

NUM_PAGES = 8
ROOM = Room(7)
PAGES = [5, 2, 6, 1]
"""Prefill's pages for the request, of which the first three are cached."""
HELD = 1
TICKETED = [3, 4, 0]


class Known(NewRequest, frozen=True, kw_only=True):
    """Request on a rank after a step."""

    pages: list[list[int]]


def known_of(new: NewRequest, pages: list[list[int]]) -> Known:
    return Known(**asdict(new), pages=pages)


@pytest.fixture
def decode() -> Iterator[Inbox]:
    with closing(Inbox("127.0.0.1")) as inbox:
        yield inbox


@pytest.fixture
def leader() -> Iterator[Inbox]:
    with closing(Inbox("127.0.0.1")) as inbox:
        yield inbox


def filled(backend: Loopback, record: RankRecord, first: int) -> Region:
    """Return pool memory in which every byte of page p is first + p."""
    region = backend.allocate(record.layout.pool_bytes)
    region.buffer[:] = bytes(first + offset // record.layout.page_bytes for offset in range(record.layout.pool_bytes))
    return region


def page_value(region: Region, num_pages: int, page: int) -> int:
    """Return the only value of all bytes in a page."""
    size = len(region.buffer) // (num_pages + 1)
    (value,) = set(region.buffer[page * size : (page + 1) * size])
    return value


def messages(inbox: Inbox, count: int) -> list[Message]:
    received: list[Message] = []
    while len(received) < count:
        arrived = inbox.receive(60.0)
        assert arrived, f"{len(received)} of {count} messages came"
        received += arrived
    return received


def new_request_to(decode: Inbox, target: Region, owner_base: int = 0) -> NewRequest:
    theirs = replace(record(Role.DECODE, 0, 1, NUM_PAGES), endpoint=target.endpoint)
    return NewRequest(
        room=ROOM,
        prompt_len=4 * PAGE_SIZE,
        owner_base=owner_base,
        sampling=Sampling(),
        destination=Destination(
            decode=Peer(replica=theirs.replica, incarnation=Incarnation(1), address=decode.address),
            ranks=[theirs],
            num_tokens=4 * PAGE_SIZE,
            pages=[TICKETED],
            num_held_pages=HELD,
        ),
    )


def plan_of(new: NewRequest, pages: list[int]) -> StepPlan:
    """Return a plan that computes the last page after cached ones."""
    return StepPlan(
        step=1,
        shape=StepShape(),
        new_requests=[new],
        scheduled=[
            ScheduledRequest(
                room=ROOM,
                first_position=3 * PAGE_SIZE,
                token_ids=[1] * PAGE_SIZE,
                new_pages=[pages],
                samples=True,
                output_position=0,
            )
        ],
        releases=[],
    )


def chunk_before(last: StepPlan) -> StepPlan:
    """Return a plan that computes the pages before the last one."""
    chunk = replace(last.scheduled[0], first_position=0, token_ids=[1] * 3 * PAGE_SIZE, samples=False)
    return replace(last, scheduled=[chunk])


def sender_of(
    mine: RankRecord, leader: Inbox, source: Region, backend: Loopback, verify: Verify = Verify.COUNTS
) -> KvSender:
    prefill = Peer(replica=mine.replica, incarnation=Incarnation(1), address=leader.address)
    return KvSender(
        prefill=prefill,
        record=mine,
        region=source.buffer,
        config=TransferConfig(verify=verify),
        outbox=Outbox(),
        start_writer=partial(SenderThread, backend, source, on_failure=_fail),
        least_span_bytes=1,
    )


def case_of(decode: Inbox) -> tuple[Loopback, RankRecord, Region, Region, NewRequest]:
    """Return a backend, a prefill rank and its pool, the decode pool, and a request."""
    backend, mine = Loopback(), record(Role.PREFILL, 0, 1, NUM_PAGES)
    source, target = filled(backend, mine, first=1), backend.allocate(mine.layout.pool_bytes)
    return backend, mine, source, target, new_request_to(decode, target)


def begin_failing_write(sender: KvSender, backend: Loopback, target: Region, plan: StepPlan) -> None:
    """Compute a plan whose write hangs until the gate opens, and then fails."""
    backend.failing.add(target.endpoint.session)
    backend.gate.clear()
    sender.before_step(plan)
    sender.after_step(plan, {ROOM: known_of(plan.new_requests[0], [PAGES])})
    assert backend.is_writing.wait(60)


def assert_reported(leader: Inbox, state: SendState) -> None:
    (report,) = messages(leader, 1)
    assert isinstance(report, SendReport)
    assert report.state is state


def _fail(error: Exception) -> None:
    pytest.fail(repr(error))


def test_cached_pages_travel_before_the_step_and_held_ones_not_at_all(decode: Inbox, leader: Inbox) -> None:
    backend, mine, source, target, new = case_of(decode)
    plan = plan_of(new, PAGES)
    with closing(sender_of(mine, leader, source, backend)) as sender:
        backend.gate.clear()
        sender.before_step(plan)
        assert backend.is_writing.wait(60)
        backend.gate.set()
        sender.after_step(plan, {ROOM: known_of(new, [PAGES])})
        (done,), (report,) = messages(decode, 1), messages(leader, 1)
    assert isinstance(done, Done)
    assert (done.num_pages, done.num_bytes) == (3, 3 * mine.layout.page_bytes)
    assert isinstance(report, SendReport)
    assert report.state is SendState.SENT
    written = {page: value for page in range(NUM_PAGES + 1) if (value := page_value(target, NUM_PAGES, page))}
    assert written == {target_page: 1 + page for page, target_page in zip(PAGES[HELD:], TICKETED, strict=True)}


def test_a_failed_transfer_does_not_restart_with_the_next_chunk(decode: Inbox, leader: Inbox) -> None:
    """Another request can own the pages once the leader knows of the failure."""
    backend, mine, source, target, new = case_of(decode)
    last = plan_of(new, PAGES)
    first, known = chunk_before(last), {ROOM: known_of(new, [PAGES])}
    with closing(sender_of(mine, leader, source, backend)) as sender:
        backend.failing.add(target.endpoint.session)
        sender.before_step(first)
        sender.after_step(first, known)
        assert_reported(leader, SendState.FAILED)
        backend.failing.clear()
        sender.before_step(replace(last, new_requests=[]))
        sender.after_step(replace(last, new_requests=[]), known)
        assert not leader.receive(0.3), "it began again"
        sender.cancel(CancelSend(room=ROOM))
        assert_reported(leader, SendState.DRAINED)
        sender.after_step(replace(last, new_requests=[], scheduled=[], releases=[ROOM]), {})
    assert not backend.batch_sizes
    assert not decode.receive(0.0)
    assert (sender.num_open, sender._failed) == (0, set())


def test_a_transfer_that_fails_between_its_release_and_its_cancellation_leaves_no_state(
    decode: Inbox, leader: Inbox
) -> None:
    backend, mine, source, target, new = case_of(decode)
    last = plan_of(new, PAGES)
    with closing(sender_of(mine, leader, source, backend)) as sender:
        begin_failing_write(sender, backend, target, chunk_before(last))
        sender.after_step(replace(last, new_requests=[], scheduled=[], releases=[ROOM]), {})
        backend.gate.set()
        assert_reported(leader, SendState.FAILED)
        sender.cancel(CancelSend(room=ROOM))
        assert_reported(leader, SendState.DRAINED)
    assert (sender.num_open, sender._failed) == (0, set())


def test_a_transfer_that_fails_after_its_last_chunk_leaves_no_state(decode: Inbox, leader: Inbox) -> None:
    """The room may have been released already, and is not released again."""
    backend, mine, source, target, new = case_of(decode)
    plan = plan_of(new, PAGES)
    with closing(sender_of(mine, leader, source, backend)) as sender:
        backend.failing.add(target.endpoint.session)
        backend.gate.clear()
        sender.before_step(plan)
        sender.after_step(plan, {ROOM: known_of(new, [PAGES])})
        sender.after_step(replace(plan, new_requests=[], scheduled=[], releases=[ROOM]), {})
        backend.gate.set()
        assert_reported(leader, SendState.FAILED)
    assert (sender.num_open, sender._failed) == (0, set())


def test_a_transfer_that_fails_after_its_cancellation_leaves_no_state(decode: Inbox, leader: Inbox) -> None:
    """The room is released while the write hangs, and is not released again."""
    backend, mine, source, target, new = case_of(decode)
    last = plan_of(new, PAGES)
    with closing(sender_of(mine, leader, source, backend)) as sender:
        begin_failing_write(sender, backend, target, chunk_before(last))
        sender.cancel(CancelSend(room=ROOM))
        sender.after_step(replace(last, new_requests=[], scheduled=[], releases=[ROOM]), {})
        backend.gate.set()
        assert_reported(leader, SendState.FAILED)
    assert (sender.num_open, sender._failed) == (0, set())


@pytest.mark.parametrize(("gone", "is_let_go"), [(0, False), (1, True), (2, True)])
def test_the_memory_of_a_lost_decode_replica_is_released_once(
    decode: Inbox, leader: Inbox, gone: int, *, is_let_go: bool
) -> None:
    backend, mine, source, target, new = case_of(decode)
    assert new.destination is not None
    with closing(sender_of(mine, leader, source, backend)) as sender:
        sender.before_step(plan_of(new, PAGES))
        sender.after_step(plan_of(new, PAGES), {ROOM: known_of(new, [PAGES])})
        messages(decode, 1)
        for _ in range(2):
            sender.forget(ForgetPeer(replica=new.destination.decode.replica, incarnation=Incarnation(gone)))
    assert backend.forgotten == [target.endpoint.session] * is_let_go


def test_the_memory_of_every_dp_rank_of_a_lost_decode_replica_is_released(decode: Inbox, leader: Inbox) -> None:
    """A request's destination is one DP rank, so one request does not name the memory of all of them."""
    backend, mine, source, target, new = case_of(decode)
    other = new_request_to(decode, backend.allocate(mine.layout.pool_bytes))
    assert new.destination is not None
    assert other.destination is not None
    with closing(sender_of(mine, leader, source, backend)) as sender:
        for request in (new, other):
            sender.before_step(plan_of(request, PAGES))
            sender.after_step(plan_of(request, PAGES), {ROOM: known_of(request, [PAGES])})
            messages(decode, 1)
            assert_reported(leader, SendState.SENT)
        sender.forget(ForgetPeer(replica=new.destination.decode.replica, incarnation=Incarnation(1)))
    assert backend.forgotten == [target.endpoint.session, other.destination.ranks[0].endpoint.session]


def test_ranks_of_a_ring_send_the_pages_they_hold(decode: Inbox, leader: Inbox) -> None:
    """Page 0 belongs to rank 1. A page id divided by 2 gives the local page, and its remainder the rank."""
    backend = Loopback()
    records = [record(Role.PREFILL, rank, 2, NUM_PAGES // 2, ownership=KvOwnership.SHARDED) for rank in range(2)]
    target = backend.allocate(record(Role.DECODE, 0, 1, NUM_PAGES).layout.pool_bytes)
    new, pages = new_request_to(decode, target, owner_base=1), [5, 2, 7, 0]
    plan = plan_of(new, pages)
    for mine in records:
        source = filled(backend, mine, first=10 * (1 + mine.global_rank))
        with closing(sender_of(mine, leader, source, backend)) as sender:
            sender.before_step(plan)
            sender.after_step(plan, {ROOM: known_of(new, [pages])})
            assert_reported(leader, SendState.SENT)
    dones = {message.sender_rank: message.num_pages for message in messages(decode, 2) if isinstance(message, Done)}
    assert dones == {0: 2, 1: 1}
    written = {page: value for page in range(NUM_PAGES + 1) if (value := page_value(target, NUM_PAGES, page))}
    assert written == dict(zip(TICKETED, [10 + 1, 20 + 3, 10 + 0], strict=True))


@pytest.mark.parametrize("flipped_page", [None, TICKETED[1]])
def test_a_bit_that_flips_between_the_write_and_its_check_is_found(
    decode: Inbox, leader: Inbox, flipped_page: int | None
) -> None:
    backend = Loopback()
    mine, theirs = record(Role.PREFILL, 0, 1, NUM_PAGES), record(Role.DECODE, 0, 1, NUM_PAGES)
    source, target = filled(backend, mine, first=1), backend.allocate(theirs.layout.pool_bytes)
    if flipped_page is not None:
        backend.flips = {flipped_page * theirs.layout.page_bytes + 5}
    new = new_request_to(decode, target)
    plan = plan_of(new, PAGES)
    with closing(sender_of(mine, leader, source, backend, Verify.DIGEST)) as sender:
        sender.before_step(plan)
        sender.after_step(plan, {ROOM: known_of(new, [PAGES])})
        (done,) = messages(decode, 1)
    assert isinstance(done, Done)
    assert coverage_problem(done.digests, TICKETED, done.num_bytes, 1) is None
    failures: list[Exception] = []
    with closing(PageChecker(theirs, target.buffer, decode.address, Outbox(), failures.append)) as checker:
        checker.check(CheckPages(room=ROOM, digests=done.digests))
        (checked,) = messages(decode, 1)
        if flipped_page is None:
            checker.check(CheckPages(room=ROOM, digests=[msgspec.structs.replace(done.digests[0], digests=[])]))
    assert len(failures) == (flipped_page is None), "the end of a thread is reported"
    assert checked == PagesChecked(room=ROOM, rank=0, wrong=[] if flipped_page is None else [flipped_page])
