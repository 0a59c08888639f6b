"""Simulated device of one rank, which carries out step plans layer by layer on the bytes of its pages."""

import zlib
from collections.abc import Callable, Sequence

from msgspec.structs import asdict

from cluster.simulator.environment import Environment
from cluster.simulator.memory import Memory, Pieces, Text, Violation, num_head_copies
from cluster.simulator.scenario import PAGE_SIZE, VOCAB_SIZE
from cluster.spec.ids import Room
from cluster.spec.kv import pages_for
from cluster.spec.sampling import Sampled
from cluster.spec.step_messages import NewRequest, ScheduledRequest, StepPlan
from workers.handoff.kv_sender import KvSender


def next_token(tokens: bytes, output_position: int) -> int:
    """Return the simulated model's next token. It depends on all tokens and on the output position."""
    return zlib.crc32(tokens, output_position) % VOCAB_SIZE


def answer(prompt: bytes, count: int) -> bytes:
    tokens = prompt
    for position in range(count):
        tokens += bytes([next_token(tokens, position)])
    return tokens[len(prompt) :]


class _Known(NewRequest, frozen=True, kw_only=True):
    text: Text
    pages: list[list[int]]


class VirtualDevice:
    def __init__(self, env: Environment, memory: Memory, sender: KvSender) -> None:
        self._env, self._memory, self._sender = env, memory, sender
        self._lifetimes = memory.record.geometry.lifetimes
        self._known: dict[Room, _Known] = {}

    def begin(self, plan: StepPlan) -> Callable[[int], None] | None:
        """Send cached pages; return the callback to run after each stored layer, or None if none is needed."""
        self._sender.before_step(plan)
        on_stored = self._sender.layer_callback(plan, self._known)
        for room in plan.releases:
            self._known.pop(room, None)
        for new in plan.new_requests:
            pages: list[list[int]] = [[] for _ in self._lifetimes]
            self._known[new.room] = _Known(**asdict(new), text=self._env.text_of(new.room), pages=pages)
        for request in plan.scheduled:
            known = self._known.get(request.room)
            if known is None:
                raise Violation(f"{self._memory.session} gets a step for room {request.room}, which it does not know")
            for known_pages, new_pages in zip(known.pages, request.new_pages, strict=False):
                known_pages += new_pages
            known.text.put(request.first_position, bytes(request.token_ids))
        return on_stored

    def take_copies(self, pages: Sequence[int], tp_group: Sequence[Memory]) -> None:
        """Copy each received page from the rank with the same heads to which prefill wrote it."""
        mine = self._memory.record
        num_copies = num_head_copies(mine)
        for page in pages if num_copies > 1 else ():
            tp_rank = mine.coords.tp // num_copies * num_copies + page % num_copies
            source = next(peer for peer in tp_group if peer.record.coords.tp == tp_rank)
            self._memory.put(page, source.page(page))

    def compute(self, plan: StepPlan, layers: range) -> None:
        """Read the KV of the step's requests in these layers, and write the KV of its tokens."""
        for lifetime in range(len(self._lifetimes)):
            pieces = self._memory.pieces(layers, lifetime)
            for request in plan.scheduled:
                self._compute(request, self._known[request.room], lifetime, layers, pieces)

    def end(self, plan: StepPlan) -> dict[Room, Sampled]:
        sampled = {}
        for request in plan.scheduled if self.is_sampling_rank else ():
            if request.samples:
                tokens = self._known[request.room].text.tokens(request.first_position + len(request.token_ids))
                sampled[request.room] = Sampled(token_id=next_token(tokens, request.output_position))
        self._sender.after_step(plan, self._known)
        return sampled

    @property
    def is_sampling_rank(self) -> bool:
        coords, sizes = self._memory.record.coords, self._memory.record.sizes
        return coords.cp == coords.tp == 0 and coords.pp == sizes.pp - 1

    def _compute(self, request: ScheduledRequest, known: _Known, lifetime: int, layers: range, pieces: Pieces) -> None:
        """Compute on this rank's pages: all of them, or those that it owns if the KV is sharded."""
        memory, mine = self._memory, self._memory.record
        num_owners, layout, text = mine.num_owners, mine.layout, known.text
        first, end = request.first_position, request.first_position + len(request.token_ids)
        seen = range(self._lifetimes[lifetime].first_page(first, PAGE_SIZE), pages_for(end, PAGE_SIZE))
        for number in seen:
            page = known.pages[lifetime][number]
            if page % num_owners != (mine.coords.cp if num_owners > 1 else 0):
                continue
            is_read = number * PAGE_SIZE < first
            if is_read and not memory.holds(page // num_owners, text.page(number, first, layout, lifetime), pieces):
                what = f"layers {layers.start} to {layers.stop - 1} of page {page} in {memory.session}"
                raise Violation(
                    f"room {request.room}: {what} are read before they hold the KV of the first {first} tokens"
                )
            if (number + 1) * PAGE_SIZE > first:
                # Followers can lag behind their leader, so the allocator describes rank 0 only.
                if mine.global_rank == 0 and not memory.allocator.is_held(page):
                    raise Violation(
                        f"{memory.session} writes to page {page}, which is not held by exactly one sequence"
                    )
                self._env.tickets.end(memory, page)
                memory.put_pieces(page // num_owners, text.page(number, end, layout, lifetime), pieces)
