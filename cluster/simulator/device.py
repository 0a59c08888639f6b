"""One rank's device: follows step plans, and computes by arithmetic on what its pages hold.

The next token is a function of all tokens so far, read back from the pages: a missing, stale or foreign page gives a
wrong token.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.simulator.memory import Memory, Violation
from cluster.simulator.scenario import PAGE_SIZE, VOCAB_SIZE
from cluster.spec.ids import Room
from cluster.spec.messages import Admit, Row, StepPlan
from cluster.spec.sampling import Sampled
from workers.kv_sender import KvSender


def next_token(tokens: bytes) -> int:
    """The simulated model."""
    return zlib.crc32(tokens) % VOCAB_SIZE


def answer(prompt: bytes, count: int) -> bytes:
    """The tokens that follow a prompt."""
    tokens = prompt
    for _ in range(count):
        tokens += bytes([next_token(tokens)])
    return tokens[len(prompt) :]


@dataclass(slots=True)
class _Known:
    admit: Admit
    pages: list[int] = field(default_factory=list)


class VirtualDevice:
    """Page tables and page memory of one rank; a step has a beginning and an end."""

    def __init__(self, memory: Memory, sender: KvSender) -> None:
        self.memory = memory
        self.sender = sender
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
        for row in plan.rows:
            pages = self._table(row)
            pages += row.new_pages
            self._write(row, pages)
            if row.samples:
                sampled[row.room] = Sampled(token_id=next_token(self._read(row, pages)))
        self.sender.after_step(plan, self._known)
        return sampled

    def _table(self, row: Row) -> list[int]:
        known = self._known.get(row.room)
        if known is None:
            raise Violation(f"{self.memory.session} is to compute room {row.room}, of which it was never told")
        return known.pages

    def _write(self, row: Row, pages: Sequence[int]) -> None:
        for position, token in enumerate(row.token_ids, start=row.first_position):
            self.memory.write(pages[position // PAGE_SIZE], position % PAGE_SIZE, token)

    def _read(self, row: Row, pages: Sequence[int]) -> bytes:
        """The KV of all tokens up to the row's last."""
        length = row.first_position + len(row.token_ids)
        tokens = b"".join(self.memory.pages[page][:PAGE_SIZE] for page in pages)[:length]
        if len(tokens) != length:
            raise Violation(f"room {row.room}: {self.memory.session} has no KV for some of its {length} tokens")
        return tokens
