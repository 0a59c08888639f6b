"""One open choice: where its tokens go, and when they came."""

import itertools

from cluster.spec.sampling import FinishReason
from cluster.spec.timeline import Interval
from router.actions import Emit
from router.answer import Answer
from router.metrics import Metrics


class Progress:
    """Hands tokens to the stream and measures them."""

    def __init__(
        self, answer: Answer, index: int, prompt_len: int, arrived_s: float, opened_s: float, metrics: Metrics
    ) -> None:
        """prompt_len: tokens; 0 where another choice brings the prompt."""
        self.answer = answer
        self.stream = answer.stream
        self._index = index
        self._prompt_len = prompt_len
        self._arrived_s = arrived_s
        self._opened_s = opened_s
        self._first_s: float | None = None
        self._last_s: float | None = None
        self._num_tokens = 0
        self._metrics = metrics

    def emit(self, action: Emit, now_s: float) -> None:
        """Tokens came."""
        self._measure(len(action.token_ids), now_s)
        if action.phases is not None:
            self._metrics.on_phases(action.phases)
            if self._prompt_len:
                self._metrics.on_prompt(self._prompt_len, action.cached.total)
            self.stream.phases = self.stream.phases or action.phases
        if action.cached.total:
            self._metrics.note_cached(action.cached)
            self.stream.cached[self._index] += action.cached
        self.stream.push(self._index, action.token_ids, action.finish, action.logprobs, action.prompt_logprobs)
        if action.finish is not None:
            self.end(action.finish, now_s)

    @property
    def num_unread(self) -> int:
        """Tokens that the client has left unread."""
        return self.stream.num_unread(self._index)

    def end(self, finish: FinishReason, now_s: float) -> None:
        """The answer is whole."""
        metrics = self._metrics
        metrics.success.add(1, finish.value)
        metrics.e2e_s.note(now_s - self._arrived_s)
        metrics.generated.note(self._num_tokens)
        if self._first_s is not None:
            metrics.on_end(self.stream.phases, now_s - self._first_s)
            if self._num_tokens > 1:
                metrics.tpot_s.note((now_s - self._first_s) / (self._num_tokens - 1))

    def intervals(self, now_s: float) -> list[Interval]:
        """The request as the router saw it, up to now."""
        marks = [
            ("read and tokenize", self._arrived_s),
            ("wait for the first token", self._opened_s),
            ("stream", self._first_s),
            ("", now_s),
        ]
        reached = [(name, time_s) for name, time_s in marks if time_s is not None]
        return [
            Interval("request", name, start_s, end_s) for (name, start_s), (_, end_s) in itertools.pairwise(reached)
        ]

    def _measure(self, num_tokens: int, now_s: float) -> None:
        if not num_tokens:
            return
        self._num_tokens += num_tokens
        self._metrics.generation_tokens.add(num_tokens)
        if self._last_s is None:
            self._first_s = now_s
            self.stream.first_s = self.stream.first_s or now_s
            self._metrics.ttft_s.note(now_s - self._arrived_s)
        else:
            self._metrics.itl_s.note((now_s - self._last_s) / num_tokens)
        self._last_s = now_s
