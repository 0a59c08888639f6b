"""Open requests of one HTTP response, and their unread outputs."""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import msgspec

from cluster.spec.clock import Interval
from cluster.spec.messages import Submit
from cluster.spec.sampling import FinishReason, TokenLogprobs
from cluster.spec.tiers import CachedTokens
from router.errors import RequestFailedError
from router.metrics import Metrics
from router.phases import Phase, phases_of, totals_of
from router.request import ChoiceId, FailRequest, GenerateRequest, OutputBatch

HEADERS = ("x-baton-prefill", "x-baton-decode", "server-timing", "x-baton-trace")
"""Response headers of answers. Only traced requests have the last one."""


class Backlog:
    """Log-probabilities that clients have not read, the only output that takes much memory."""

    def __init__(self) -> None:
        self.total = 0
        self._num_of: dict[Answer, int] = {}

    @property
    def largest(self) -> "Answer":
        return max(self._num_of, key=lambda answer: self._num_of[answer])

    def add(self, answer: "Answer", logprobs: Sequence[TokenLogprobs]) -> None:
        num = sum(1 + len(each.top_ids) for each in logprobs)
        self._num_of[answer] = self._num_of.get(answer, 0) + num
        self.total += num

    def forget(self, answer: "Answer") -> None:
        self.total -= self._num_of.pop(answer, 0)


class Answer:
    """Choices of one response, as a context manager that cancels unfinished ones on exit.

    ``push`` never waits. Memory is bounded, because unread batches are joined and a choice has at most max_tokens
    tokens.
    """

    def __init__(
        self,
        requests: Sequence[GenerateRequest],
        stop_early: Callable[[ChoiceId], None],
        leave: Callable[[Sequence[ChoiceId]], None],
        backlog: Backlog | None = None,
    ) -> None:
        """Open an answer with one request per choice; choices of one prompt are adjacent in ``requests``."""
        self.requests = requests
        self.num_prompt_tokens = sum(len(request.prompt_ids) for request in requests if not request.shares_prompt)
        """Number of prompt tokens. A prompt counts once, even with several choices."""
        self.arrived_s = requests[0].arrived_s
        self.is_traced = requests[0].traced
        self._stop_early = stop_early
        self._leave = leave
        self._backlog = backlog or Backlog()
        self.choice_ids: list[ChoiceId] = []
        """Ids of the requests that have been opened so far."""
        self.submits: dict[ChoiceId, Submit] = {}
        """Message that started each choice's current attempt."""
        self.is_left = False
        """True once nobody reads the answer any more."""
        self.queue_s = 0.0
        """Time spent waiting for capacity at replicas."""
        self.opened_s = 0.0
        self.trace_header: dict[str, str] = {}
        """Response header that names the OpenTelemetry trace."""
        self.cached = CachedTokens()
        """Cached prompt tokens. A prompt counts once, even with several choices."""
        self.phases: Sequence[Phase] = ()
        """Phases in replicas of the choice whose first token arrived first."""
        self.prompt_s: float | None = None
        """Time of a prompt's computation; None until it is known."""
        self.first_s: float | None = None
        """Time at which the first token of any choice arrived."""
        self.num_tokens = 0
        """Number of tokens of all choices, read or unread."""
        self._num_unfinished = len(requests)
        self._unread: dict[int, OutputBatch] = {}
        self._failure: FailRequest | None = None
        self._reader: asyncio.Future[None] | None = None

    @property
    def prefills(self) -> str:
        """Names of the replicas that compute the prompts."""
        submits = (each for each in self.submits.values() if each.prompt_of is None)
        return ", ".join(dict.fromkeys((each.prefill or each.decode).replica for each in submits))

    @property
    def decodes(self) -> str:
        """Names of the replicas that decode the choices."""
        return ", ".join(dict.fromkeys(each.decode.replica for each in self.submits.values()))

    @property
    def headers(self) -> dict[str, str]:
        replicas = {"x-baton-prefill": self.prefills, "x-baton-decode": self.decodes}
        trace = {"x-baton-trace": f"/traces/{self.choice_ids[-1]}"} if self.is_traced else {}
        return replicas | {"server-timing": self._timing} | trace | self.trace_header

    @property
    def _timing(self) -> str:
        """Return the value of the Server-Timing header (https://www.w3.org/TR/server-timing)."""
        if self.first_s is None:
            return f"queue;dur={self.queue_s * 1000:.3f}"
        times = totals_of(self.phases_until(self.first_s)) | {"ttft": self.first_s - self.arrived_s}
        return ", ".join(f"{name};dur={seconds * 1000:.3f}" for name, seconds in times.items())

    def phases_until(self, now_s: float) -> Iterator[Phase]:
        """Yield the phases in order, up to the last one that the request has reached."""
        queued_s = self.opened_s - self.queue_s
        yield Phase("preprocess", self.arrived_s, queued_s)
        yield Phase("queue", queued_s, self.opened_s)
        yield from self.phases
        if self.first_s is not None and now_s > self.first_s:
            yield Phase("decode", self.first_s, now_s, self.phases[-1].replica if self.phases else None)

    def summary(self, outcome: str, ended_s: float) -> "Summary":
        return Summary(
            id=self.requests[0].request_id,
            key=self.requests[0].tenant,
            ended=time.time(),
            seconds=ended_s - self.arrived_s,
            prompt_tokens=self.num_prompt_tokens,
            num_tokens=self.num_tokens,
            outcome=outcome,
            phases=[*self.phases_until(ended_s)],
        )

    def push(self, index: int, batch: OutputBatch) -> None:
        unread = self._unread.get(index)
        if unread is None:
            self._unread[index] = batch
        else:
            unread.append(batch)
        self.num_tokens += len(batch.token_ids)
        if batch.logprobs:
            self._backlog.add(self, batch.logprobs)
        self._wake()

    def fail(self, failure: FailRequest) -> None:
        self._failure = failure
        self._take_unread()
        self._wake()

    def stop_early(self, index: int) -> None:
        """End a choice that is complete although the model has not ended it."""
        self._stop_early(self.requests[index].choice_id)
        self._unread.pop(index, None)
        self._num_unfinished -= 1

    async def receive(self) -> list[tuple[int, OutputBatch]]:
        """Wait for output; return one batch for each choice that has any, or an empty list if all choices have
        finished.

        Raises:
            RequestFailedError: the answer will not be complete.
        """
        if not self._num_unfinished:
            return []
        if not self._unread and self._failure is None:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if self._failure is not None:
            raise RequestFailedError(self._failure.cause, self._failure.reason)
        unread = self._take_unread()
        self._num_unfinished -= sum(batch.finish is not None for batch in unread.values())
        return list(unread.items())

    def _take_unread(self) -> dict[int, OutputBatch]:
        self._backlog.forget(self)
        unread, self._unread = self._unread, {}
        return unread

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_left = True
        self._take_unread()
        self._leave(self.choice_ids)


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a finished request."""

    id: str
    key: str
    """Name of the API key."""
    ended: float
    """Unix time of the end."""
    seconds: float
    prompt_tokens: int
    num_tokens: int
    outcome: str
    phases: Sequence[Phase]

    def entry(self) -> dict[str, Any]:
        """Return the request's entry on the status page, with times in seconds."""
        replicas = {phase.name: phase.replica for phase in self.phases}
        phases = [
            {"name": name, "seconds": seconds, "replica": replicas.get(name, replicas.get("prefill"))}
            for name, seconds in totals_of(self.phases).items()
        ]
        return msgspec.structs.asdict(self) | {"phases": phases}


class OpenChoice:
    """One choice of an answer, which receives output and measures latency."""

    def __init__(self, answer: Answer, index: int, metrics: Metrics) -> None:
        self.answer = answer
        self._index = index
        self._first_s: float | None = None
        self._last_s: float | None = None
        self._metrics = metrics

    def take(self, batch: OutputBatch, now_s: float) -> None:
        request = self.answer.requests[self._index]
        self._measure(len(batch.token_ids), now_s)
        if batch.phases is not None:
            phases = phases_of(batch.phases, self.answer.opened_s, now_s)
            self._metrics.on_phases(batch.phases, phases)
            if not request.shares_prompt:
                self._metrics.on_prompt(request, batch.cached.total)
            self.answer.phases = self.answer.phases or phases
            self.answer.prompt_s = batch.phases.prompt.seconds
        if batch.cached.total and not request.shares_prompt:  # a further choice may start anew with the whole prompt
            self._metrics.on_cached(batch.cached)
            self.answer.cached += batch.cached
        self.answer.push(self._index, batch)
        if batch.finish is not None:
            self.end(batch.finish, now_s)

    def end(self, finish: FinishReason, now_s: float) -> None:
        metrics = self._metrics
        metrics.success.add(1, finish.value)
        metrics.e2e_s.observe(now_s - self.answer.arrived_s)
        num_tokens = len(self.answer.requests[self._index].output_ids)
        metrics.generated.observe(num_tokens)
        if self._first_s is not None:
            metrics.on_end(self.answer.prompt_s, now_s - self._first_s)
            if num_tokens > 1:
                metrics.tpot_s.observe((now_s - self._first_s) / (num_tokens - 1))

    def intervals(self, now_s: float) -> list[Interval]:
        """Return the router's part of the request's trace."""
        starts = [
            ("read and tokenize", self.answer.arrived_s),
            ("wait for the first token", self.answer.opened_s),
            ("stream", self._first_s),
            ("", now_s),
        ]
        reached = [(name, time_s) for name, time_s in starts if time_s is not None]
        return [
            Interval("request", name, begin_s, end_s) for (name, begin_s), (_, end_s) in itertools.pairwise(reached)
        ]

    def _measure(self, num_tokens: int, now_s: float) -> None:
        if not num_tokens:
            return
        self._metrics.generation_tokens.add(num_tokens)
        if self._last_s is None:
            self._first_s = now_s
            self.answer.first_s = self.answer.first_s or now_s
            self._metrics.ttft_s.observe(now_s - self.answer.arrived_s)
        else:
            self._metrics.itl_s.observe((now_s - self._last_s) / num_tokens)
        self._last_s = now_s
