"""One rank's sender over the real channel: what was cached travels before the step, what decode holds not at all."""

from collections.abc import Iterator
from contextlib import closing

import pytest
from msgspec.structs import replace

from cluster.channel import Inbox
from cluster.spec.config import TransferConfig
from cluster.spec.ids import Incarnation, Room
from cluster.spec.lifecycle import Role
from cluster.spec.messages import Admit, Done, Message, Peer, Row, Sampling, SendReport, SendState, StepPlan, Target
from cluster.spec.strategy import Strategy
from tests.fakes.handoff import PAGE_SIZE, row
from tests.fakes.loopback import Loopback
from transfer.backends.interface import Region
from workers.engine.runner import KnownRequest
from workers.kv_sender import KvSender

pytestmark = pytest.mark.integration

NUM_PAGES = 8
ROOM = Room(7)
PAGES = [5, 2, 6, 1]
"""The request's pages in prefill; the first three are cached."""
HELD = 1
TICKETED = [3, 4, 0]


@pytest.fixture
def decode() -> Iterator[Inbox]:
    with closing(Inbox("127.0.0.1")) as inbox:
        yield inbox


@pytest.fixture
def leader() -> Iterator[Inbox]:
    with closing(Inbox("127.0.0.1")) as inbox:
        yield inbox


def page_bytes(region: Region, page: int) -> bytes:
    size = len(region.buffer) // (NUM_PAGES + 1)
    return bytes(region.buffer[page * size : (page + 1) * size])


def one_message(inbox: Inbox) -> Message:
    (message,) = inbox.receive(10.0)
    return message


def test_cached_pages_travel_before_the_step_and_held_ones_not_at_all(decode: Inbox, leader: Inbox) -> None:
    backend = Loopback()
    mine = row(Role.PREFILL, 0, 1, NUM_PAGES)
    source, target = (backend.allocate(mine.layout.pool_bytes) for _ in range(2))
    source.buffer[:] = bytes(1 + place // mine.layout.page_bytes for place in range(mine.layout.pool_bytes))
    theirs = replace(row(Role.DECODE, 0, 1, NUM_PAGES), endpoint=target.endpoint)
    admit = Admit(
        room=ROOM,
        prompt_len=4 * PAGE_SIZE,
        owner_base=0,
        sampling=Sampling(),
        target=Target(
            generation=1,
            decode=Peer(replica=theirs.replica, incarnation=Incarnation(1), address=decode.address),
            rows=[theirs],
            pages=TICKETED,
            held_pages=HELD,
        ),
    )
    plan = StepPlan(
        step=1,
        strategy=Strategy.NONE,
        admits=[admit],
        rows=[
            Row(
                room=ROOM,
                first_position=3 * PAGE_SIZE,
                token_ids=[1] * PAGE_SIZE,
                new_pages=PAGES,
                samples=True,
                output_position=0,
            )
        ],
        releases=[],
    )
    prefill = Peer(replica=mine.replica, incarnation=Incarnation(1), address=leader.address)
    with closing(
        KvSender(prefill=prefill, row=mine, config=TransferConfig(), region=source, backend=backend)
    ) as sender:
        backend.gate.clear()
        sender.before_step(plan)
        assert backend.is_writing.wait(10)
        backend.gate.set()
        sender.after_step(plan, {ROOM: KnownRequest(admit, PAGES)})
        done, report = one_message(decode), one_message(leader)
    assert isinstance(done, Done)
    assert (done.num_pages, done.num_bytes) == (3, 3 * mine.layout.page_bytes)
    assert isinstance(report, SendReport)
    assert report.state is SendState.SENT
    for page, ticketed in zip(PAGES[HELD:], TICKETED, strict=True):
        assert page_bytes(target, ticketed) == page_bytes(source, page)
    untouched = set(range(NUM_PAGES + 1)) - set(TICKETED)
    assert not any(any(page_bytes(target, page)) for page in untouched)
