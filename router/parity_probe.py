"""Parity probes: decode computes a finished request again, alone and without caches, and compares log-probabilities.

A wrong page anywhere on a request's path (context parallelism, handoff, tiers, caches) raises no error, but changes the
log-probabilities of the answer. A probe takes the simplest path: one decode replica, which computes every token in
steps of ``decode.chunk_tokens``. The model's own log-probabilities do not depend on how tokens were sampled.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from cluster.logs import with_facts
from cluster.spec.config import DeployConfig
from cluster.spec.sampling import Sampling, Stopping
from cluster.spec.worker_spec import RouterShare
from router.answer import Answer
from router.directory import Directory
from router.errors import NotReadyError, QueueFullError, RequestFailedError
from router.metrics import Metrics
from router.parity import COARSE_ROUNDING, compare, unit_of
from router.request import Cause, GenerateRequest, OutputBatch

_log = logging.getLogger(__name__)

STEP_EVERY_S = 4.0
"""Mean time per step of a probe, which limits the length of probes by the period between them."""
MAX_LEN = 1 << 18
"""Maximum number of tokens of a probe, whose log-probabilities arrive in one message of 16 MiB."""
LEAST_URGENT = (1 << 31) - 1


class RecordedAnswer(Answer):
    """Answer of one choice that records its log-probabilities. It hides them from a client that did not ask for any."""

    def __init__(self, max_tokens: int, on_end: "Callable[[RecordedAnswer], None]", *args: Any) -> None:
        """Open an answer; ``args`` are those of ``Answer``.

        Args:
            max_tokens: maximum number of recorded tokens.
            on_end: called when the answer has been left.
        """
        super().__init__(*args)
        (self.request,) = self.requests
        self._max_tokens = max_tokens
        self._on_end = on_end
        self._is_hiding = self.request.sampling.num_logprobs is None
        if self._is_hiding:
            self.request.sampling = replace(self.request.sampling, num_logprobs=0)
        self.logprobs: list[float] = []
        """Log-probabilities of the first tokens."""

    def push(self, index: int, batch: OutputBatch) -> None:
        num_left = self._max_tokens - len(self.logprobs)
        self.logprobs += [each.logprob for each in batch.logprobs[:num_left]]
        if self._is_hiding:
            batch.logprobs = []
        super().push(index, batch)

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self._on_end(self)

    def probe(self, now_s: float) -> GenerateRequest:
        """Return a request for the log-probabilities of the prompt and the recorded tokens.

        It avoids the decode replica of this answer, so that another one checks it.
        """
        return GenerateRequest(
            prompt_ids=self.request.prompt_ids + self.request.output_ids[: len(self.logprobs)],
            sampling=Sampling(num_prompt_logprobs=0),
            stopping=Stopping(max_tokens=1),
            priority=LEAST_URGENT,
            avoided=frozenset(submit.decode for submit in self.submits.values()),
            is_probe=True,
            arrived_s=now_s,
        )


class ParityProbe:
    """Probes of one router process, one at a time. Not thread-safe: all methods run in one event loop."""

    def __init__(self, config: DeployConfig, share: RouterShare, directory: Directory, metrics: Metrics) -> None:
        period_s = config.router.parity_probe_s
        self._period_s = period_s * share.num_processes
        self.max_len = min(MAX_LEN, int(config.decode.chunk_tokens * period_s / STEP_EVERY_S))
        """Maximum number of tokens of a probe. Of a longer answer, only the first tokens are compared."""
        self._directory = directory
        self._metrics = metrics
        for result in ("match", "mismatch", "failed"):  # Prometheus sees a first increment only after a 0
            metrics.parity_probes.add(0, result)
        self._wanted: asyncio.Future[RecordedAnswer] | None = None
        """Future of the next answer to record; None while no answer is wanted."""

    def maker(self, requests: Sequence[GenerateRequest]) -> Callable[..., Answer]:
        """Return the constructor of these requests' answer: a ``RecordedAnswer`` if one is wanted and can be probed."""
        wanted = self._wanted
        if wanted is None or len(requests) > 1 or (num_left := self.max_len - len(requests[0].prompt_ids)) <= 0:
            return Answer
        self._wanted = None

        def on_end(answer: RecordedAnswer) -> None:
            if not answer.logprobs:
                self._wanted = wanted
            elif not wanted.done():
                wanted.set_result(answer)

        return lambda *args: RecordedAnswer(num_left, on_end, *args)

    async def run(
        self,
        open_answer: Callable[[Sequence[GenerateRequest]], Answer],
        is_crowded: Callable[[], bool],
        now_s: Callable[[], float],
    ) -> None:
        """Probe one request per period, unless requests wait for capacity then."""
        _log.info("a parity probe every %g s, of up to %d tokens", self._period_s, self.max_len)
        while True:
            await asyncio.sleep(self._period_s)
            self._wanted = asyncio.get_running_loop().create_future()
            answer = await self._wanted
            if is_crowded():
                continue
            with suppress(NotReadyError, QueueFullError), open_answer([answer.probe(now_s())]) as again:
                try:
                    await self._compare(answer, again)
                except RequestFailedError as error:
                    self._metrics.parity_probes.add(1, "failed")
                    _log.warning("a parity probe failed: %s", error, extra=_facts(answer, again))

    async def _compare(self, answer: RecordedAnswer, again: Answer) -> None:
        ((_, batch),) = await again.receive()
        num_tokens, num_given = len(answer.logprobs), len(batch.prompt_logprobs)
        if num_given != again.num_prompt_tokens - 1:
            reason = f"{again.num_prompt_tokens} tokens came back with {num_given} log-probabilities"
            raise RequestFailedError(Cause.BROKEN_OUTPUT, reason)
        computed = [each.logprob for each in batch.prompt_logprobs[-num_tokens:]]
        comparison = compare(answer.logprobs, computed, self._unit(again))
        self._metrics.parity_probes.add(1, "match" if comparison.is_match else "mismatch")
        self._metrics.parity_difference.observe(comparison.largest)
        if not comparison.is_match:
            _log.error(
                "parity mismatch: log-probabilities of %d tokens after a prompt of %d differ by %.3g at most and %.3g "
                "on average",
                num_tokens,
                answer.num_prompt_tokens,
                comparison.largest,
                comparison.mean,
                extra=_facts(answer, again),
            )

    def _unit(self, again: Answer) -> float:
        (submit,) = again.submits.values()
        ranks = self._directory.ranks(submit.decode)
        return unit_of(ranks[0].geometry.dtypes) if ranks else COARSE_ROUNDING


def _facts(answer: RecordedAnswer, again: Answer) -> dict[str, Any]:
    request = answer.request
    return with_facts(
        request_id=request.request_id,
        choice=request.choice_id,
        retries=request.num_retries or None,
        prefill=answer.prefills,
        decode=answer.decodes,
        probe=again.decodes,
    )
