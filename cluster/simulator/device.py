"""One rank's device: follows step plans, and computes by arithmetic on what its pages hold.

The next token is a function of all tokens so far, read back from the pages: a missing, stale or foreign page gives a
wrong token.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cluster.simulator.memory import Memory, Violation
from cluster.simulator.scenario import PAGE_SIZE, VOCAB_SIZE
from cluster.spec.ids import Room
from cluster.spec.registry import RankRow
from cluster.spec.sampling import Sampled
from cluster.spec.step_messages import Admit, ScheduledRequest, StepPlan
from transfer.plan import local_page
from workers.kv_sender import KvSender


def next_token(tokens: bytes, output_position: int) -> int:
    """The simulated model and its chance, which depends on the output position."""
    return zlib.crc32(tokens, output_position) % VOCAB_SIZE


def answer(prompt: bytes, count: int) -> bytes:
    """The tokens that follow a prompt."""
    tokens = prompt
    for position in range(count):
        tokens += bytes([next_token(tokens, position)])
    return tokens[len(prompt) :]


@dataclass(slots=True)
class _Known:
    admit: Admit
    pages: list[int] = field(default_factory=list)


class VirtualDevice:
    """Page tables and page memory of one rank; a step has a beginning and an end."""

    def __init__(self, rows: Sequence[RankRow], cp_rank: int, memories: Mapping[str, Memory], sender: KvSender) -> None:
        """``rows`` are those of all ranks of the DP rank, ``memories`` everybody's by session."""
        self.sender = sender
        self._row = rows[cp_rank]
        self._sessions = [row.endpoint.session for row in rows]
        self._memories = memories
        self._known: dict[Room, _Known] = {}

    def begin(self, plan: StepPlan) -> None:
        """Send what was cached while the step computes."""
        self.sender.before_step(plan)

    def end(self, plan: StepPlan) -> dict[Room, Sampled]:
        """Write the step's tokens, sample, and send the pages that are whole."""
        for room in plan.releases:
            self._known.pop(room, None)
        for admit in plan.admits:
            self._known[admit.room] = _Known(admit)
        sampled = {}
        for row in plan.scheduled:
            pages = self._table(row)
            pages += row.new_pages
            self._write(row, pages)
            if row.samples and self._row.coords.cp == 0:
                sampled[row.room] = Sampled(token_id=next_token(self._read(row, pages), row.output_position))
        self.sender.after_step(plan, self._known)
        return sampled

    def _table(self, row: ScheduledRequest) -> list[int]:
        known = self._known.get(row.room)
        if known is None:
            raise Violation(f"{self._row.endpoint.session} is to compute room {row.room}, of which it was never told")
        return known.pages

    def _write(self, row: ScheduledRequest, pages: Sequence[int]) -> None:
        """Store the tokens of the pages that this rank has: all of them, or those it owns."""
        num_owners = self._row.num_owners
        memory = self._memories[self._row.endpoint.session]
        for position, token in enumerate(row.token_ids, start=row.first_position):
            page = pages[position // PAGE_SIZE]
            # Followers may be some steps behind their leader, whose allocator says what is true there.
            if self._row.global_rank == 0 and not memory.allocator.is_held(page):
                raise Violation(f"{memory.session} computes into page {page}, which no sequence holds alone")
            if num_owners == 1 or page % num_owners == self._row.coords.cp:
                memory.write(local_page(self._row, page), position % PAGE_SIZE, token)

    def _read(self, row: ScheduledRequest, pages: Sequence[int]) -> bytes:
        """The KV of all tokens up to the row's last, from the ranks that have it."""
        length = row.first_position + len(row.token_ids)
        tokens = b"".join(self._page(page) for page in pages)[:length]
        if len(tokens) != length:
            raise Violation(f"room {row.room}: {self._row.replica} has no KV for some of its {length} tokens")
        return tokens

    def _page(self, page: int) -> bytes:
        num_owners = self._row.num_owners
        owner = page % num_owners if num_owners > 1 else self._row.coords.cp
        return self._memories[self._sessions[owner]].tokens(page // num_owners)
