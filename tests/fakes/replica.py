"""Prefill and decode replicas that speak the real messages over the real channel and compute nothing.

Decode answers with the prompt repeated, so the answer's text is the prompt's text: output i is prompt[1 + i mod (len -
1)] for a prompt that begins with BOS.
"""

import threading
import time
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
    RankTrace,
    Submit,
    SubscribeKvEvents,
)
from cluster.spec.phases import ComputedStep, PhaseTimes, PromptTimes
from cluster.spec.sampling import FinishReason, TokenLogprobs
from cluster.spec.step_messages import ReportTrace, Shutdown
from cluster.spec.tiers import CachedTokens
from tests.fakes.bootstrap import peer_of

_T = TypeVar("_T")


def answer_of(submit: Submit) -> tuple[list[int], FinishReason]:
    """Return the complete answer, including the tokens from earlier attempts."""
    prompt_ids = submit.prompt_ids[: len(submit.prompt_ids) - submit.num_given]
    body = prompt_ids[1:] or prompt_ids
    tokens: list[int] = []
    for i in range(submit.stopping.max_tokens):
        tokens.append(body[i % len(body)])
        if tokens[-1] in submit.stopping.stop_token_ids:
            return tokens, FinishReason.STOP
    return tokens, FinishReason.LENGTH


def logprobs_of(token_id: int, num_top: int) -> TokenLogprobs:
    """Return log-probabilities of a token, for which the next ids in the vocabulary are the most likely ones."""
    return TokenLogprobs(
        logprob=-token_id / 1000,
        top_ids=[(token_id + index) % 256 for index in range(1, num_top + 1)],
        top_logprobs=[-index / 8 for index in range(1, num_top + 1)],
    )


def _prompt_logprobs(submit: Submit) -> list[TokenLogprobs]:
    num_top = submit.sampling.num_prompt_logprobs
    return [] if num_top is None else [replace(logprobs_of(id_, num_top), rank=9) for id_ in submit.prompt_ids[1:]]


PHASES = ["preprocess", "queue", "decode-queue", "bootstrap", "storage", "prefill-queue", "prefill", "communication"]
PHASES += ["transfer", "delivery", "decode"]
"""Phases of every request to fake replicas, in order."""
PREFILL_S = 33e-6
"""Time from the scheduling of a prompt to the end of its only step."""


def phases_of(submit: Submit) -> PhaseTimes | None:
    """Return times for every prompt that take a few microseconds, less than the message itself."""
    if submit.prefill is None:
        return None
    sent_s = time.monotonic()
    prompt = PromptTimes(
        replica=submit.prefill.replica,
        stored_s=sent_s - 40e-6,
        scheduled_s=sent_s - 38e-6,
        steps=[ComputedStep(sent_s - 35e-6, sent_s - 5e-6, communication_s=10e-6)],
    )
    return PhaseTimes(decode=submit.decode.replica, granted_s=sent_s - 43e-6, sent_s=sent_s, prompt=prompt)


@dataclass
class FakeReplica:
    """Leader in a thread. Its fields change its behavior at any time."""

    name: str
    token_s: float = 0.0
    """Time between two batches of tokens."""
    batch: int = 3
    """Tokens in one Output."""
    fails: str | None = None
    """Failure with which every Submit is answered."""
    fails_after: int | None = None
    """Number of tokens after which answers fail."""
    cached_tokens: int = 0
    """Number of cached tokens that the first Output reports."""
    skips: int = 0
    """Number of answers that lose their second batch."""
    silent: bool = False
    """Whether traces are withheld."""
    refusal: str = ""
    """Refusal with which commands are answered."""
    num_pinned: int = 0
    """Number of pinned pages in its answers to commands."""
    says: Sequence[int] | None = None
    """Fixed tokens for every answer."""
    flow: threading.Event = field(default_factory=threading.Event)
    """Event without which no tokens are sent."""
    submits: list[Submit] = field(default_factory=list)
    cancels: list[Cancel] = field(default_factory=list)
    page_keys: list[bytes] = field(default_factory=list)
    """Keys of cached pages that it reports to routers."""
    received: list[Message] = field(default_factory=list)
    """All other messages that arrived."""
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
        outbox.send(self.peer.address, Shutdown())
        self._thread.join()
        outbox.close()

    @property
    def num_open(self) -> int:
        """Return the number of requests that are neither finished nor cancelled."""
        return len(self._open)

    def wait_cancels(self, count: int) -> list[Cancel]:
        return self._wait(lambda: self.cancels, count)

    def wait_submits(self, count: int) -> list[Submit]:
        return self._wait(lambda: self.submits, count)

    def wait_submits_of(self, rooms: Collection[Room], count: int) -> list[Submit]:
        """Return the Submit messages for these rooms. Those for other requests may arrive in between."""
        return self._wait(lambda: [submit for submit in self.submits if submit.room in rooms], count)

    def wait_message(self, kind: type) -> list[Message]:
        return self._wait(lambda: [message for message in self.received if isinstance(message, kind)], 1)

    def _wait(self, found: Callable[[], list[_T]], count: int) -> list[_T]:
        """Return the messages once there are enough."""
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
                    self.received.append(message.wanted)
                    outbox.send(message.sender.address, self._taken(message))
                case _:
                    self.received.append(message)
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
        """Return an hour of work, wherever the clock stands."""
        return RankTrace(
            room=room,
            replica=self.peer.replica,
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
