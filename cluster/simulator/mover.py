"""One rank's half of the tiers, as ``workers.hicache.mover`` does it: orders are carried out beside the steps.

Host memory dies with its process; storage, which all replicas share, does not.
"""

from collections import deque
from collections.abc import Sequence
from functools import partial

from cluster.simulator.memory import Memory, Violation
from cluster.simulator.process import Process
from cluster.simulator.scenario import PAGE_SIZE
from cluster.spec.registry import KvOwnership, RankRow
from cluster.spec.tiers import MoveKind, MovePages, PagesMoved, TierPage
from transfer.plan import local_page

_LANES = {
    MoveKind.SAVE: "saves",
    MoveKind.LOAD: "loads",
    MoveKind.LOOK_UP: "reads",
    MoveKind.FETCH: "reads",
    MoveKind.STORE: "writes",
}
_TORN = b"\xff" * PAGE_SIZE
"""What is left where a copy failed."""


class VirtualMover:
    """Each lane does one order after another."""

    def __init__(
        self, process: Process, leader_address: str, rows: Sequence[RankRow], cp_rank: int, memory: Memory
    ) -> None:
        """``rows`` are those of all ranks of the DP rank."""
        self._process, self._around, self._leader_address = process, process.around, leader_address
        self._rows, self._row, self._memory = rows, rows[cp_rank], memory
        self._lanes: dict[str, deque[MovePages]] = {lane: deque() for lane in _LANES.values()}
        self._num_filling = 0

    @property
    def is_idle(self) -> bool:
        """No order is open."""
        return not self._num_filling and not any(self._lanes.values())

    def take(self, order: MovePages) -> None:
        """Carry out an order, after those that came before it."""
        lane = self._lanes[_LANES[order.kind]]
        lane.append(order)
        if len(lane) == 1:
            self._begin(lane)

    def fill(self, order: MovePages) -> float:
        """Load pages that a step waits for; how long that takes. Such copies do not fail."""
        seconds = self._around.random.uniform(1e-3, 0.1)
        self._num_filling += 1
        self._process.after(seconds, partial(self._end_fill, order))
        return seconds

    def _end_fill(self, order: MovePages) -> None:
        self._num_filling -= 1
        self._around.moved["fill"] += len(order.pages)
        self._answer(order, fails=False)

    def _begin(self, lane: deque[MovePages]) -> None:
        longest_s = self._around.random.choice([0.01, 0.1, 3.0 if self._around.hazards.slow_move else 0.1])
        self._process.after(self._around.random.uniform(1e-3, longest_s), partial(self._end, lane))

    def _end(self, lane: deque[MovePages]) -> None:
        order = lane.popleft()
        fails = self._around.random.random() < self._around.hazards.fail_move
        self._around.happened["fail_move"] += fails
        self._answer(order, fails=fails)
        if lane:
            self._begin(lane)

    def _answer(self, order: MovePages, *, fails: bool) -> None:
        self._around.moved[order.kind] += len(order.pages)
        done = [self._move(order.kind, page, fails=fails) for page in order.pages]
        answer = PagesMoved(
            number=order.number,
            global_rank=self._row.global_rank,
            done=done,
            failures={"error": len(done)} if fails else {},
        )
        self._process.send(self._leader_address, answer)

    def _move(self, kind: MoveKind, page: TierPage, *, fails: bool) -> bool:
        """This rank's part of one page; true where it has none."""
        is_owner = page.place % self._row.sizes.cp == self._row.coords.cp
        if kind is MoveKind.LOAD:
            return self._load(page, fails=fails) if is_owner or self._row.ownership is KvOwnership.REPLICATED else True
        if not is_owner:
            return True
        if kind is MoveKind.LOOK_UP:
            return page.key in self._around.storage and not fails
        assert page.host is not None
        slot = page.host // self._row.sizes.cp
        if kind is MoveKind.STORE:
            return not fails and self._store(page.key, _filled(self._memory, slot))
        source = self._around.storage.get(page.key) if kind is MoveKind.FETCH else self._on_device(page)
        self._memory.host[slot] = _TORN if fails or source is None else source
        return not fails and source is not None

    def _load(self, page: TierPage, *, fails: bool) -> bool:
        assert page.host is not None
        assert page.device is not None
        cp = self._row.sizes.cp
        peer = self._around.memories[self._rows[page.host % cp].endpoint.session]
        if not self._memory.allocator.is_held(page.device):
            raise Violation(f"{self._memory.session} loads page {page.device}, which no sequence holds alone")
        is_there = not peer.is_gone and not fails
        tokens = _filled(peer, page.host // cp) if is_there else _TORN
        self._memory.put(local_page(self._row, page.device), tokens)
        return is_there

    def _store(self, key: bytes, tokens: bytes) -> bool:
        if len(tokens) != PAGE_SIZE or self._around.storage.setdefault(key, tokens) != tokens:
            raise Violation(f"{self._memory.session} stores the tokens of one page under the key of another")
        return True

    def _on_device(self, page: TierPage) -> bytes:
        """As it is now; the leader throws the copy away if the page was given up meanwhile."""
        assert page.device is not None
        return self._memory.tokens(local_page(self._row, page.device))


def _filled(memory: Memory, slot: int) -> bytes:
    if slot not in memory.host:
        raise Violation(f"host page {slot} of {memory.session} is read, which nobody has filled")
    return memory.host[slot]
