"""Parity probes: which answers are recorded, what a probe asks for, and what its outcome leads to."""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from cluster.spec.config import DeployConfig
from cluster.spec.ids import Room
from cluster.spec.messages import Submit
from cluster.spec.sampling import FinishReason, Sampling, TokenLogprobs
from cluster.spec.worker_spec import ALONE, router_shares
from router.answer import Answer
from router.directory import Directory
from router.errors import NotReadyError, QueueFullError
from router.metrics import Metrics
from router.parity_probe import LEAST_URGENT, MAX_LEN, ParityProbe, RecordedAnswer
from router.request import Cause, ChoiceId, FailRequest, GenerateRequest, OutputBatch
from tests.fakes.bootstrap import entry_of, table_of
from tests.fakes.dispatching import DECODE, ME, PREFILL, ask, on

PROMPT_LEN = len(ask().prompt_ids)
ANSWER = {7: -0.5, 8: -1.5, 9: -2.5}
"""Tokens of an answer with their log-probabilities."""


def make(period_s: float = 8.0, chunk_tokens: int = 16) -> ParityProbe:
    tree = {"router": {"parity_probe_s": period_s}, "decode": {"chunk_tokens": chunk_tokens}}
    directory = Directory(grace_s=1.0)
    directory.update(table_of(entry_of(PREFILL), entry_of(DECODE)), 0.0)
    return ParityProbe(DeployConfig.model_validate(tree), ALONE, directory, Metrics())


def scored(*logprobs: float) -> list[TokenLogprobs]:
    return [TokenLogprobs(logprob=logprob, top_ids=[], top_logprobs=[]) for logprob in logprobs]


def batch_of(answer: dict[int, float], finish: FinishReason | None = None) -> OutputBatch:
    return OutputBatch(choice_id=ChoiceId(1), token_ids=[*answer], logprobs=scored(*answer.values()), finish=finish)


class Replicas:
    """Relay whose replicas know log-probabilities of all tokens."""

    def __init__(self, probe: ParityProbe) -> None:
        self.probe = probe
        self.truth = dict(ANSWER)
        self.refusal: Exception | None = None
        self.failure: FailRequest | None = None
        self.num_missing = 0
        """Number of prompt log-probabilities that do not come back."""
        self.is_crowded = False
        self.probes: list[GenerateRequest] = []

    def serve(self, *requests: GenerateRequest, answer: dict[int, float] | None = None) -> list[OutputBatch]:
        """Answer a client. Return what reaches it."""
        answer, given = ANSWER if answer is None else answer, []
        with self._make(requests) as opened:
            for token_id, logprob in answer.items():
                requests[0].output_ids.append(token_id)
                given.append(batch_of({token_id: logprob}))
                opened.push(0, given[-1])
        return given

    def open(self, requests: Sequence[GenerateRequest]) -> Answer:
        """Answer a probe."""
        if self.refusal is not None:
            raise self.refusal
        (request,) = requests
        self.probes.append(request)
        opened = self._make(requests)
        prompt = scored(*(self.truth.get(token_id, -3.0) for token_id in request.prompt_ids[1 + self.num_missing :]))
        batch = batch_of({1: -1.0}, FinishReason.LENGTH)
        batch.prompt_logprobs = prompt
        if self.failure is None:
            opened.push(0, batch)
        else:
            opened.fail(self.failure)
        return opened

    def _make(self, requests: Sequence[GenerateRequest]) -> Answer:
        opened = self.probe.maker(requests)(requests, lambda _: None, lambda _: None)
        opened.submits = {ChoiceId(1): submit_of(requests[0])}
        return opened

    @contextmanager
    def probing(self) -> Iterator[None]:
        running = asyncio.create_task(self.probe.run(self.open, lambda: self.is_crowded, lambda: 5.0))
        yield
        running.cancel()

    def results(self) -> dict[str, float]:
        """Return the number of probes by result, without zeros."""
        counts = self.probe._metrics.parity_probes.values
        return {labels[0]: value for labels, value in counts.items() if value}


def submit_of(request: GenerateRequest) -> Submit:
    return request.make_submit(Room(1), on(), None, ME)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0.001)


@pytest.fixture
def replicas() -> Replicas:
    return Replicas(make(period_s=0.001, chunk_tokens=1 << 20))


class TestChoice:
    async def wanting(self, probe: ParityProbe) -> ParityProbe:
        probe._wanted = asyncio.get_running_loop().create_future()
        return probe

    async def test_nothing_is_recorded_before_the_period_is_over(self) -> None:
        assert make().maker([ask()]) is Answer

    async def test_one_answer_is_recorded_at_a_time(self) -> None:
        probe = await self.wanting(make())
        assert probe.maker([ask()]) is not Answer
        assert probe.maker([ask()]) is Answer

    async def test_answers_of_several_choices_are_not_recorded(self) -> None:
        probe = await self.wanting(make())
        assert probe.maker([ask(), ask()]) is Answer
        assert probe.maker([ask()]) is not Answer

    @pytest.mark.parametrize(("chunk_tokens", "is_short"), [(PROMPT_LEN + 1, True), (PROMPT_LEN, False)])
    async def test_prompts_must_leave_room_for_an_answer(self, chunk_tokens: int, *, is_short: bool) -> None:
        probe = await self.wanting(make(period_s=4.0, chunk_tokens=chunk_tokens))
        assert (probe.maker([ask()]) is not Answer) == is_short

    def test_the_length_grows_with_the_period_up_to_a_limit(self) -> None:
        assert [make(period_s, 2048).max_len for period_s in (60, 300, 86_400)] == [30_720, 153_600, MAX_LEN]

    def test_processes_take_turns(self) -> None:
        config = DeployConfig.model_validate({"router": {"parity_probe_s": 60.0, "processes": 3}})
        shares = [*router_shares(3), ALONE]
        probes = [ParityProbe(config, share, Directory(grace_s=1.0), Metrics()) for share in shares]
        assert [probe._period_s for probe in probes] == [180.0, 180.0, 180.0, 60.0]
        assert len({probe.max_len for probe in probes}) == 1


class TestRecording:
    def record(self, request: GenerateRequest, max_tokens: int = 100) -> RecordedAnswer:
        answer = RecordedAnswer(max_tokens, lambda _: None, [request], lambda _: None, lambda _: None)
        answer.push(0, batch_of({7: -0.5, 8: -1.5}))
        answer.push(0, batch_of({9: -2.5}, FinishReason.STOP))
        return answer

    async def test_a_client_that_did_not_ask_gets_no_log_probabilities(self) -> None:
        request = ask()
        answer = self.record(request)
        assert request.sampling == Sampling(num_logprobs=0)
        assert answer.logprobs == [*ANSWER.values()]
        assert answer._backlog.total == 0
        ((_, batch),) = await answer.receive()
        assert (batch.token_ids, batch.logprobs) == ([*ANSWER], [])

    async def test_a_client_that_asked_gets_them(self) -> None:
        request = ask(Sampling(num_logprobs=3))
        answer = self.record(request)
        assert request.sampling == Sampling(num_logprobs=3)
        assert answer.logprobs == [*ANSWER.values()]
        ((_, batch),) = await answer.receive()
        assert batch.logprobs == scored(*ANSWER.values())

    @pytest.mark.parametrize("max_tokens", [1, 2, 3, 4])
    def test_long_answers_are_recorded_in_part(self, max_tokens: int) -> None:
        answer = self.record(ask(), max_tokens)
        assert answer.logprobs == [*ANSWER.values()][:max_tokens]

    def test_a_probe_asks_decode_for_the_tokens_that_were_recorded(self) -> None:
        request = ask(Sampling(temperature=1.0, min_tokens=5))
        answer = self.record(request, max_tokens=2)
        answer.submits = {ChoiceId(1): submit_of(request)}
        request.output_ids = [*ANSWER]
        probe = answer.probe(now_s=5.0)
        assert [*probe.prompt_ids] == [1, 2, 3, 7, 8]
        assert (probe.sampling, probe.stopping.max_tokens) == (Sampling(num_prompt_logprobs=0), 1)
        assert (probe.is_probe, probe.avoided, probe.priority) == (True, frozenset([DECODE]), LEAST_URGENT)
        assert not probe.may_use_cache


class TestOutcome:
    async def test_answers_that_are_right_match(self, replicas: Replicas, caplog: pytest.LogCaptureFixture) -> None:
        with replicas.probing():
            for count in (1, 2, 3):
                await settle()
                replicas.serve(ask())
                await settle()
                assert replicas.results() == {"match": count}
        assert [record.levelno for record in caplog.records if record.levelno > logging.INFO] == []

    async def test_a_mismatch_is_counted_and_logged(self, replicas: Replicas, caplog: pytest.LogCaptureFixture) -> None:
        replicas.truth[8] = -9.5
        request = ask()
        request.request_id = "req-1"
        with replicas.probing():
            await settle()
            replicas.serve(request)
            await settle()
        assert replicas.results() == {"mismatch": 1}
        (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert "3 tokens after a prompt of 3 differ by 8 at most and 2.67 on average" in record.getMessage()
        facts = {"request_id": "req-1", "prefill": "prefill-0", "decode": "decode-0", "probe": "decode-0"}
        assert facts.items() <= record.facts.items()  # type: ignore[attr-defined]
        assert replicas.probe._metrics.parity_difference.values[()][-1] == 8.0

    async def test_an_answer_without_tokens_gives_way_to_the_next(self, replicas: Replicas) -> None:
        with replicas.probing():
            await settle()
            replicas.serve(ask(), answer={})
            replicas.serve(ask())
            await settle()
        assert replicas.results() == {"match": 1}

    async def test_no_probe_while_requests_wait(self, replicas: Replicas) -> None:
        replicas.is_crowded = True
        with replicas.probing():
            await settle()
            replicas.serve(ask())
            await settle()
            assert (replicas.probes, replicas.results()) == ([], {})
            replicas.is_crowded = False
            replicas.serve(ask())
            await settle()
        assert replicas.results() == {"match": 1}

    @pytest.mark.parametrize("refusal", [QueueFullError("full"), NotReadyError("draining")])
    async def test_a_probe_that_is_refused_is_left_out(self, replicas: Replicas, refusal: Exception) -> None:
        replicas.refusal = refusal
        with replicas.probing():
            await settle()
            replicas.serve(ask())
            await settle()
            assert replicas.results() == {}
            replicas.refusal = None
            replicas.serve(ask())
            await settle()
        assert replicas.results() == {"match": 1}

    @pytest.mark.parametrize("kind", ["a failure", "a missing number"])
    async def test_failed_probes_are_counted(
        self, replicas: Replicas, kind: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        if kind == "a failure":
            replicas.failure = FailRequest(choice_id=ChoiceId(1), cause=Cause.REPLICA_LOST, reason="decode-0 is lost")
        else:
            replicas.num_missing = 1
        with replicas.probing():
            await settle()
            replicas.serve(ask())
            await settle()
            assert replicas.results() == {"failed": 1}
            replicas.failure, replicas.num_missing = None, 0
            replicas.serve(ask())
            await settle()
        assert replicas.results() == {"failed": 1, "match": 1}
        assert "a parity probe failed" in caplog.text
