"""Layers of a prompt's last pages are sent while the step continues: each once, with the computed bytes."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import pytest
from msgspec.structs import replace

from cluster.channel import Inbox
from cluster.spec.ids import Role, Room
from cluster.spec.kv import PoolLayout
from cluster.spec.registry import RankRecord, Verify
from cluster.spec.step_messages import NewRequest, SendReport, StepPlan
from cluster.spec.transfer_messages import Done, SendState
from tests.fakes.kv import kv_geometry, kv_layout
from tests.fakes.loopback import Loopback
from tests.fakes.paged_ranks import PAGE_SIZE, record
from tests.fakes.waits import wait_until
from tests.integration.test_kv_sender import (
    HELD,
    NUM_PAGES,
    PAGES,
    ROOM,
    TICKETED,
    Known,
    known_of,
    messages,
    new_request_to,
    plan_of,
    sender_of,
)
from transfer.backends.interface import Region
from transfer.page_range import coverage_problem
from workers.handoff.kv_sender import KvSender

pytestmark = pytest.mark.integration

NUM_LAYERS, NUM_HEADS = 8, 2
ENDS = [2, 4, 6]


def deep(of: RankRecord) -> RankRecord:
    """Return the rank with several layers and heads."""
    num_pages, page_size = of.layout.num_pages, of.layout.page_size
    layout = kv_layout(num_pages=num_pages, num_layers=NUM_LAYERS, num_heads=NUM_HEADS, page_size=page_size)
    geometry = kv_geometry(num_layers=NUM_LAYERS, num_kv_heads=NUM_HEADS, page_size=page_size)
    return replace(of, layout=layout, geometry=geometry)


def pages_of(region: Region, layout: PoolLayout) -> npt.NDArray[np.uint8]:
    """Return the pages as ``[page, head, layer, byte]``."""
    (group,) = layout.groups
    shape = (-1, group.num_heads, layout.num_layers, group.layer_bytes)
    return np.frombuffer(region.buffer, dtype=np.uint8).reshape(shape)


@dataclass
class Case:
    sender: KvSender
    backend: Loopback
    new: NewRequest
    layout: PoolLayout
    source: npt.NDArray[np.uint8]
    target: npt.NDArray[np.uint8]
    decode: Inbox
    leader: Inbox

    @property
    def known(self) -> dict[Room, Known]:
        return {ROOM: known_of(self.new, [PAGES])}

    def compute(self, layer: int) -> None:
        """Write the KV of one layer."""
        self.source[PAGES, :, layer] = np.random.default_rng(layer).integers(1, 256, self.source[PAGES, :, layer].shape)

    def is_there(self, layers: slice) -> bool:
        sent = self.source[PAGES[HELD:], :, layers]
        return np.array_equal(self.target[TICKETED, :, layers], sent) and bool(sent.all())


@pytest.fixture
def case() -> Iterator[Case]:
    backend = Loopback()
    mine = deep(record(Role.PREFILL, 0, 1, NUM_PAGES))
    source, target = backend.allocate(mine.layout.pool_bytes), backend.allocate(mine.layout.pool_bytes)
    with closing(Inbox("127.0.0.1")) as decode, closing(Inbox("127.0.0.1")) as leader:
        new = new_request_to(decode, target)
        assert new.destination is not None
        new = replace(new, destination=replace(new.destination, ranks=[deep(new.destination.ranks[0])]))
        with closing(sender_of(mine, leader, source, backend, Verify.DIGEST)) as sender:
            pools = pages_of(source, mine.layout), pages_of(target, mine.layout)
            yield Case(sender, backend, new, mine.layout, *pools, decode, leader)


def chunk(new: NewRequest, first_page: int, num_pages: int) -> StepPlan:
    plan = plan_of(new, PAGES)
    tokens = [1] * num_pages * PAGE_SIZE
    return replace(
        plan, scheduled=[replace(plan.scheduled[0], first_position=first_page * PAGE_SIZE, token_ids=tokens)]
    )


@contextmanager
def step(case: Case, plan: StepPlan) -> Iterator[Callable[[int], None]]:
    case.sender.before_step(plan)
    on_stored = case.sender.layer_callback(plan, case.known)
    assert on_stored is not None
    yield on_stored
    case.sender.after_step(plan, case.known)


def test_layers_are_sent_while_later_ones_are_computed(case: Case) -> None:
    with step(case, chunk(case.new, 0, 4)) as on_stored:
        for layer in range(NUM_LAYERS):
            case.compute(layer)
            on_stored(layer)
            if layer + 1 in ENDS:
                wait_until(partial(case.is_there, slice(layer + 1)))
        assert not case.target[:, :, ENDS[-1] :].any()
        assert not case.leader.receive(0.1), "it is not over"
    (done,), (report,) = messages(case.decode, 1), messages(case.leader, 1)
    assert case.is_there(slice(None))
    assert isinstance(done, Done)
    assert isinstance(report, SendReport)
    assert (report.state, done.num_pages, done.num_bytes) == (SendState.SENT, 3, 3 * case.layout.page_bytes)
    assert coverage_problem(done.digests, TICKETED, done.num_bytes, 1) is None
    assert sum(case.backend.batch_sizes) == 3 * NUM_HEADS * (len(ENDS) + 1)
    assert not case.target[[page for page in range(NUM_PAGES + 1) if page not in TICKETED]].any()


def test_an_unfinished_prompt_is_sent_in_whole_pages(case: Case) -> None:
    for layer in range(NUM_LAYERS):
        case.compute(layer)
    with step(case, chunk(case.new, 0, 2)) as on_stored:
        for layer in range(NUM_LAYERS):
            on_stored(layer)
        assert not case.backend.is_writing.wait(0.1)
    wait_until(lambda: case.backend.batch_sizes == [1])
    with step(case, replace(chunk(case.new, 2, 2), new_requests=[])) as on_stored:
        for layer in range(NUM_LAYERS):
            on_stored(layer)
    (done,) = messages(case.decode, 1)
    assert case.is_there(slice(None))
    assert isinstance(done, Done)
    assert (done.num_pages, done.num_bytes) == (3, 3 * case.layout.page_bytes)


def test_layers_that_cannot_be_written_end_the_transfer(case: Case) -> None:
    assert case.new.destination is not None
    case.backend.failing.add(case.new.destination.ranks[0].endpoint.session)
    with step(case, chunk(case.new, 0, 4)) as on_stored:
        for layer in range(NUM_LAYERS):
            case.compute(layer)
            on_stored(layer)
        (report,) = messages(case.leader, 1)
        case.backend.failing.clear()
    assert isinstance(report, SendReport)
    assert report.state is SendState.FAILED
    assert not case.decode.receive(0.2)
    assert not case.target.any()
    assert not case.sender.num_open
