"""Both ends together under a network that delays, reorders, repeats and loses messages, with failing writes and a
prefill that dies: pages are never free while anyone may write, and every transfer ends."""

from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cluster.spec.ids import Incarnation
from cluster.spec.peer import Peer
from cluster.spec.step_messages import Target
from cluster.spec.transfer_messages import Done, Drained, Refused, Result, Revoke, SendState, Ticket
from tests.unit.transfer.samples import DECODE, PREFILL, ROOM, ticket
from transfer.receiver_session import ReceiverSession, ReceiverState
from transfer.sender_session import SenderSession, SenderState, is_quiet

PAGE = 2
PAGE_BYTES = 10
RANKS = 2
SETTLE_S = 3.0
SILENCE_S = 30.0
ToDecode = Result | Done | Refused | Drained


@dataclass
class _Prefill:
    """The smallest leader and ranks that keep the protocol; writes run when the test says so."""

    prompt_len: int
    lost_bytes: int
    """Missing from every write, unnoticed."""
    sessions: list[SenderSession] = field(default_factory=list)
    queued: list[list[int]] = field(default_factory=list)
    """Per rank: jobs handed to its sender thread, by their number of pages; the first one is running."""
    computed_len: int = 0
    has_result: bool = False
    is_alive: bool = True
    was_revoked: bool = False
    is_stopping: bool = False
    quiet_at_s: float = 0.0
    """Until then bytes of failed writes may arrive."""

    def accept(self, message: Ticket) -> list[ToDecode]:
        if self.was_revoked:
            return []
        if self.sessions:
            has_ended = self.has_result and all(session.state is SenderState.SENT for session in self.sessions)
            return [_refused("it has ended")] if has_ended else []
        num_pages = -(-self.prompt_len // PAGE)
        target = Target(
            generation=1,
            decode=DECODE,
            rows=[],
            num_tokens=self.prompt_len,
            pages=message.pages[0],
            held_pages=0,
        )
        for rank in range(RANKS):
            self.sessions.append(
                SenderSession(
                    room=ROOM,
                    target=target,
                    prefill=PREFILL,
                    sender_rank=rank,
                    page_size=PAGE,
                    owned=range(rank, num_pages, RANKS),
                    sends=True,
                )
            )
            self.queued.append([])
        return []

    def compute(self, num_tokens: int) -> list[ToDecode]:
        self.computed_len = min(self.prompt_len, self.computed_len + num_tokens)
        said: list[ToDecode] = []
        for rank, session in enumerate(self.sessions):
            was_over = session.is_over
            pairs = session.advance(range(100), self.computed_len)
            if pairs:
                self.queued[rank].append(len(pairs))
            if not was_over:
                said += self._last_words(session)
        if self.computed_len == self.prompt_len and not self.has_result:
            self.has_result = True
            num_pages = len(self.sessions[0].target.pages)
            said.append(
                Result(
                    room=ROOM,
                    generation=1,
                    prefill=PREFILL,
                    decode_incarnation=DECODE.incarnation,
                    token_ids=[1],
                    senders=list(range(RANKS)),
                    num_pages=num_pages,
                    num_bytes=num_pages * PAGE_BYTES,
                )
            )
        return said

    def end_write(self, rank: int) -> list[ToDecode]:
        num_pages = self.queued[rank].pop(0)
        session = self.sessions[rank]
        session.written(num_pages, num_pages * PAGE_BYTES - self.lost_bytes)
        self.confirm_drops()
        return self._last_words(session)

    def fail_write(self, rank: int, now_s: float) -> None:
        self.queued[rank].clear()
        self.sessions[rank].failed("the wire is cut")
        self.quiet_at_s = now_s + SETTLE_S
        self.stop()

    def stop(self) -> None:
        self.is_stopping = True
        for rank, session in enumerate(self.sessions):
            session.drop()
            del self.queued[rank][1:]
        self.confirm_drops()

    def confirm_drops(self) -> None:
        """A sender thread confirms a drop when its running write has ended."""
        for rank, session in enumerate(self.sessions):
            if not self.queued[rank]:
                session.drained()

    def answer(self, now_s: float) -> list[ToDecode]:
        """What the leader says once everything is quiet, again and again to repeated revokes."""
        states: list[SendState] = [session.report().state for session in self.sessions]
        if not (self.is_stopping or self.was_revoked) or not is_quiet(states) or now_s < self.quiet_at_s:
            return []
        if self.was_revoked:
            return [Drained(room=ROOM, generation=1, prefill=PREFILL, decode_incarnation=DECODE.incarnation)]
        return [_refused("it failed")]

    def _last_words(self, session: SenderSession) -> list[ToDecode]:
        done = session.done()
        return [done] if done else []


def _refused(reason: str) -> Refused:
    return Refused(room=ROOM, generation=1, prefill=PREFILL, decode_incarnation=DECODE.incarnation, reason=reason)


class TransferProtocol(RuleBasedStateMachine):
    """Each rule is one thing that can happen in the world."""

    @initialize(prompt_len=st.integers(1, 9), lost_bytes=st.sampled_from([0, 0, 0, 1]))
    def begin(self, prompt_len: int, lost_bytes: int) -> None:
        num_pages = -(-prompt_len // PAGE)
        self.now_s = 0.0
        self.prefill = _Prefill(prompt_len, lost_bytes)
        self.died_at_s: float | None = None
        self.to_decode: list[ToDecode] = []
        self.to_prefill: list[Ticket | Revoke] = []
        self.decode = ReceiverSession(
            ticket(list(range(50, 50 + num_pages))),
            PREFILL,
            num_pages=num_pages,
            num_bytes=num_pages * PAGE_BYTES,
            num_ranks=1,
            silence_s=SILENCE_S,
            settle_s=SETTLE_S,
        )
        self.to_prefill.append(self.decode.open(self.now_s))

    def _tell(self, message: Ticket | Revoke | None) -> None:
        if message is not None:
            self.to_prefill.append(message)

    @rule(seconds=st.sampled_from([0.5, 2.0, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self._tell(self.decode.tick(self.now_s))

    @precondition(lambda self: self.prefill.is_alive)
    @rule(steps=st.sampled_from([1, 3, 6, 12, 40]))
    def all_goes_well_for_a_while(self, steps: int) -> None:
        """Without this, random events hardly ever take a transfer to its end."""
        for _ in range(steps):
            if self.to_prefill:
                self._at_prefill(self.to_prefill.pop(0))
            elif any(self.prefill.queued):
                rank = next(rank for rank, jobs in enumerate(self.prefill.queued) if jobs)
                self.to_decode += self.prefill.end_write(rank)
            elif self.to_decode:
                self._tell(self.decode.handle(self.to_decode.pop(0), self.now_s))
            elif self.prefill.sessions:
                self.to_decode += self.prefill.compute(3) + self.prefill.answer(self.now_s)

    @precondition(lambda self: self.prefill.sessions and self.prefill.is_alive)
    @rule(num_tokens=st.integers(1, 9))
    def a_chunk_is_computed(self, num_tokens: int) -> None:
        self.to_decode += self.prefill.compute(num_tokens)

    @precondition(lambda self: self.prefill.is_alive and any(self.prefill.queued))
    @rule(data=st.data())
    def a_write_ends(self, data: st.DataObject) -> None:
        self.to_decode += self.prefill.end_write(self._busy_rank(data))

    @precondition(lambda self: self.prefill.is_alive and any(self.prefill.queued))
    @rule(data=st.data())
    def a_write_fails(self, data: st.DataObject) -> None:
        self.prefill.fail_write(self._busy_rank(data), self.now_s)

    @precondition(lambda self: self.to_decode)
    @rule(data=st.data(), fate=st.sampled_from(["arrive", "arrive", "arrive", "repeat", "lose"]))
    def something_comes_to_decode(self, data: st.DataObject, fate: str) -> None:
        index = data.draw(st.integers(0, len(self.to_decode) - 1))
        message = self.to_decode[index] if fate == "repeat" else self.to_decode.pop(index)
        if fate != "lose":
            self._tell(self.decode.handle(message, self.now_s))

    @precondition(lambda self: self.to_prefill)
    @rule(data=st.data(), fate=st.sampled_from(["arrive", "arrive", "arrive", "repeat", "lose"]))
    def something_comes_to_prefill(self, data: st.DataObject, fate: str) -> None:
        index = data.draw(st.integers(0, len(self.to_prefill) - 1))
        message = self.to_prefill[index] if fate == "repeat" else self.to_prefill.pop(index)
        if fate != "lose" and self.prefill.is_alive:
            self._at_prefill(message)

    @precondition(lambda self: self.prefill.is_alive)
    @rule()
    def the_leader_answers(self) -> None:
        self.to_decode += self.prefill.answer(self.now_s)

    @rule(earlier=st.sampled_from(["generation", "prefill", "decode"]))
    def a_message_of_the_past_arrives(self, earlier: str) -> None:
        old = PREFILL.incarnation - 1 if earlier == "prefill" else PREFILL.incarnation
        drained = Drained(
            room=ROOM,
            generation=0 if earlier == "generation" else 1,
            prefill=Peer(replica=PREFILL.replica, incarnation=Incarnation(old), address=PREFILL.address),
            decode_incarnation=Incarnation(DECODE.incarnation - (earlier == "decode")),
        )
        state = self.decode.state
        self._tell(self.decode.handle(drained, self.now_s))
        assert self.decode.state is state

    @rule(what=st.sampled_from(["decode cancels", "prefill dies", "the table shows it", "the table is old", *[""] * 6]))
    def something_breaks(self, what: str) -> None:
        if what == "decode cancels":
            self._tell(self.decode.cancel("the client left", self.now_s))
        elif what == "prefill dies" and self.prefill.is_alive:
            self.prefill.is_alive = False
            self.died_at_s = self.now_s
        elif what == "the table shows it" and not self.prefill.is_alive:
            self.decode.prefill_gone(PREFILL.incarnation, self.now_s)
        elif what == "the table is old":
            self.decode.prefill_gone(Incarnation(PREFILL.incarnation - 1), self.now_s)

    @invariant()
    def no_page_is_free_while_anyone_may_write(self) -> None:
        if self.decode.may_free:
            assert not self._may_write()

    @invariant()
    def ready_means_that_every_byte_is_there(self) -> None:
        if self.decode.state is ReceiverState.READY:
            written = sum(session.num_bytes_written for session in self.prefill.sessions)
            assert written == len(self.decode.ticket.pages[0]) * PAGE_BYTES

    def teardown(self) -> None:
        """From any state, a world that only moves on ends the transfer."""
        if not hasattr(self, "decode"):
            return
        for _ in range(60):
            if self.decode.may_free:
                break
            self.now_s += 1.0
            self._tell(self.decode.tick(self.now_s))
            if self.prefill.is_alive:
                for rank, jobs in enumerate(self.prefill.queued):
                    if jobs:
                        self.to_decode += self.prefill.end_write(rank)
                for order in self.to_prefill:
                    self._at_prefill(order)
                self.to_decode += self.prefill.compute(9) if self.prefill.sessions else []
                self.to_decode += self.prefill.answer(self.now_s)
            else:
                self.decode.prefill_gone(PREFILL.incarnation, self.now_s)
            self.to_prefill = []
            for message in self.to_decode:
                self._tell(self.decode.handle(message, self.now_s))
            self.to_decode = []
            self.no_page_is_free_while_anyone_may_write()
        assert self.decode.may_free, self.decode.state

    def _busy_rank(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from([rank for rank, jobs in enumerate(self.prefill.queued) if jobs]))

    def _at_prefill(self, message: Ticket | Revoke) -> None:
        if isinstance(message, Ticket):
            self.to_decode += self.prefill.accept(message)
        else:
            self.prefill.was_revoked = True
            self.prefill.stop()

    def _may_write(self) -> bool:
        if not self.prefill.is_alive:
            assert self.died_at_s is not None
            was_busy = any(self.prefill.queued) or self.prefill.quiet_at_s > self.died_at_s
            return was_busy and self.now_s < self.died_at_s + SETTLE_S
        unsent = any(
            session.report().state is SendState.SENDING and not self.prefill.is_stopping
            for session in self.prefill.sessions
        )
        return unsent or any(self.prefill.queued) or self.now_s < self.prefill.quiet_at_s


TestTransferProtocol = TransferProtocol.TestCase
TestTransferProtocol.settings = settings(
    max_examples=600, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
