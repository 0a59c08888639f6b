"""A prefill and a decode replica that speak the real messages over the real channel, and compute nothing.

The decode side answers with the prompt over again, so the text of an answer is the text of its prompt:
output i is prompt[1 + i mod (len - 1)] for a prompt that begins with BOS.
"""

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, TypeVar

from msgspec.structs import replace

from cluster.channel import Inbox, Outbox
from cluster.spec.clock import Interval, read_clock
from cluster.spec.ids import Peer, Room
from cluster.spec.messages import (
    Cancel,
    Command,
    CommandResult,
    Failure,
    KvEvents,
    Message,
    Output,
    Outputs,
    PhaseTimes,
    RankTrace,
    Submit,
    SubscribeKvEvents,
)
from cluster.spec.sampling import FinishReason, TokenLogprobs
from cluster.spec.step_messages import ReportTrace, Shutdown
from cluster.spec.tiers import CachedTokens
from tests.fakes.bootstrap import peer_of

_T = TypeVar("_T")


def answer_of(submit: Submit) -> tuple[list[int], FinishReason]:
    """The whole answer, computable on paper, with what was given of it before."""
    prompt_ids = submit.prompt_ids[: len(submit.prompt_ids) - submit.num_given]
    body = prompt_ids[1:] or prompt_ids
    tokens: list[int] = []
    for i in range(submit.stopping.max_tokens):
        tokens.append(body[i % len(body)])
        if tokens[-1] in submit.stopping.stop_token_ids:
            return tokens, FinishReason.STOP
    return tokens, FinishReason.LENGTH


def logprobs_of(token_id: int, num_top: int) -> TokenLogprobs:
    """Of a token, whose followers in the vocabulary are the likeliest."""
    return TokenLogprobs(
        logprob=-token_id / 1000,
        top_ids=[(token_id + place) % 256 for place in range(1, num_top + 1)],
        top_logprobs=[-place / 8 for place in range(1, num_top + 1)],
    )


def _prompt_logprobs(submit: Submit) -> list[TokenLogprobs]:
    num_top = submit.sampling.num_prompt_logprobs
    return [] if num_top is None else [replace(logprobs_of(id_, num_top), rank=9) for id_ in submit.prompt_ids[1:]]


def phases_of(submit: Submit) -> PhaseTimes | None:
    """The times that every prompt takes."""
    if submit.prefill is None:
        return None
    return PhaseTimes(
        prefill=submit.prefill.replica,
        decode=submit.decode.replica,
        decode_queue_s=0.002,
        bootstrap_s=0.003,
        prefill_s=0.04,
        transfer_s=0.005,
    )


@dataclass
class FakeReplica:
    """One leader in a thread. Change how it behaves by its fields, at any time."""

    name: str
    token_s: float = 0.0
    """Time between two batches of tokens."""
    batch: int = 3
    """Tokens in one Output."""
    fails: str | None = None
    """Answer every Submit with this failure."""
    fails_after: int | None = None
    """Fail once this many tokens were sent."""
    cached_tokens: int = 0
    """What the first Output says of the prompt."""
    skips: int = 0
    """So many answers lose their second batch."""
    silent: bool = False
    """Give no traces."""
    refusal: str = ""
    """With which it answers commands."""
    num_pinned: int = 0
    """As it answers them."""
    says: Sequence[int] | None = None
    """The tokens of every answer instead."""
    flow: threading.Event = field(default_factory=threading.Event)
    """While clear, no tokens are sent."""
    submits: list[Submit] = field(default_factory=list)
    cancels: list[Cancel] = field(default_factory=list)
    page_keys: list[bytes] = field(default_factory=list)
    """What it says it has cached when a router asks."""
    told: list[Message] = field(default_factory=list)
    """Everything else that came."""
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __enter__(self) -> Self:
        self.flow.set()
        self._inbox = Inbox("127.0.0.1")
        self.peer: Peer = peer_of(self.name, address=self._inbox.address)
        self._open: dict[Room, tuple[Submit, int]] = {}
        self._thread = threading.Thread(target=self._loop, name=self.name)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        outbox = Outbox()
        outbox.send(self.peer.address, Shutdown(reason="test over"))
        self._thread.join()
        outbox.close()

    @property
    def num_open(self) -> int:
        """Requests that were neither finished nor cancelled."""
        return len(self._open)

    def wait_cancels(self, count: int) -> list[Cancel]:
        return self._wait(lambda: self.cancels, count)

    def wait_submits(self, count: int) -> list[Submit]:
        return self._wait(lambda: self.submits, count)

    def wait_submits_of(self, rooms: Collection[Room], count: int) -> list[Submit]:
        """The submits of these rooms; those of other requests may come between."""
        return self._wait(lambda: [submit for submit in self.submits if submit.room in rooms], count)

    def wait_told(self, kind: type) -> list[Message]:
        return self._wait(lambda: [message for message in self.told if isinstance(message, kind)], 1)

    def _wait(self, found: Callable[[], list[_T]], count: int) -> list[_T]:
        """Return messages as soon as there are so many."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(found()) >= count, 60.0), f"{self.name}: {found()}"
            return list(found())

    def _loop(self) -> None:
        outbox = Outbox()
        running = True
        while running:
            busy = bool(self._open) and self.flow.is_set()
            for message in self._inbox.receive(self.token_s if busy else 0.02):
                running = running and self._take(message, outbox)
            if self.flow.is_set():
                self._emit(outbox)
        self._inbox.close()
        outbox.close()

    def _take(self, message: Message, outbox: Outbox) -> bool:
        with self.changed:
            match message:
                case Submit():
                    self.submits.append(message)
                    if self.fails is not None:
                        self._fail(message, outbox, self.fails)
                    elif self.name.startswith("decode"):
                        self._open[message.room] = message, message.num_given
                case ReportTrace() if not self.silent:
                    outbox.send(message.reply_to, self._rank_trace(message.room))
                case Cancel():
                    self.cancels.append(message)
                    self._open.pop(message.room, None)
                case SubscribeKvEvents():
                    outbox.send(message.router.address, self._kv_events())
                case Command():
                    self.told.append(message.wanted)
                    outbox.send(message.sender.address, self._taken(message))
                case _:
                    self.told.append(message)
            self.changed.notify_all()
        return not isinstance(message, Shutdown)

    def _taken(self, command: Command) -> CommandResult:
        return CommandResult(
            number=command.number,
            replica=self.peer.replica,
            incarnation=self.peer.incarnation,
            refusal=self.refusal,
            num_pinned=self.num_pinned,
        )

    def _kv_events(self) -> KvEvents:
        return KvEvents(
            replica=self.peer.replica,
            incarnation=self.peer.incarnation,
            number=0,
            stored=self.page_keys,
            removed=[],
        )

    def _rank_trace(self, room: Room) -> RankTrace:
        """An hour of work, wherever the clock stands."""
        return RankTrace(
            room=room,
            replica=self.peer.replica,
            incarnation=self.peer.incarnation,
            global_rank=0,
            clock=read_clock(),
            intervals=[Interval("compute", "step 1", 0.0, 3600.0)],
            num_left_out=0,
        )

    def _emit(self, outbox: Outbox) -> None:
        for room, (submit, start) in list(self._open.items()):
            tokens, finish = answer_of(submit) if self.says is None else ([*self.says], FinishReason.STOP)
            end = start + self.batch
            last = end >= len(tokens)
            self._open[room] = submit, end
            if last or (self.fails_after is not None and end > self.fails_after):
                del self._open[room]
            if not last and room not in self._open:
                self._fail(submit, outbox, "out of memory")
            elif self.skips and start == submit.num_given + self.batch:
                self.skips -= 1
            else:
                self._send(outbox, submit, start, tokens[start:end], finish if last else None)

    def _send(self, outbox: Outbox, submit: Submit, start: int, tokens: list[int], finish: FinishReason | None) -> None:
        num_top = submit.sampling.num_logprobs
        output = Output(
            room=submit.room,
            replica=self.peer.replica,
            incarnation=self.peer.incarnation,
            first_index=start,
            token_ids=tokens,
            prompt_logprobs=_prompt_logprobs(submit) if start == 0 else [],
            logprobs=[] if num_top is None else [logprobs_of(token_id, num_top) for token_id in tokens],
            finish=finish,
            cached=CachedTokens(total=self.cached_tokens if start == 0 else 0),
            phases=phases_of(submit) if start == 0 else None,
        )
        outbox.send(submit.router.address, Outputs(outputs=[output]))

    def _fail(self, submit: Submit, outbox: Outbox, reason: str) -> None:
        failure = Failure(
            room=submit.room,
            replica=self.peer.replica,
            incarnation=self.peer.incarnation,
            reason=reason,
            retryable=True,
        )
        outbox.send(submit.router.address, failure)
