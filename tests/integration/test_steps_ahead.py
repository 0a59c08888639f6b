"""A decode worker whose device goes on by itself plans a step ahead, and answers as one that waits for every step."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.channel import Inbox, Outbox
from cluster.spec.config import DeployConfig
from cluster.spec.ids import ROUTER, Incarnation, Room
from cluster.spec.lifecycle import Role
from cluster.spec.messages import Inquire, Output, Outputs, Submit
from cluster.spec.peer import Peer
from cluster.spec.sampling import FinishReason, Sampling, Stopping
from cluster.spec.step_messages import Shutdown, StepPlan
from cluster.spec.token_ids import TokenIds
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.worker_specs import lone_worker
from workers.cache.layer_arrivals import LayerArrivals
from workers.cache.page_pool import OnStored
from workers.worker import Worker

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

HOST, PAGE_SIZE, PAGE_BYTES, NUM_PAGES = "127.0.0.1", 4, 2048, 24
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.0, seed=1, num_logprobs=2),
    Sampling(temperature=1.0, seed=2, top_p=0.9, logit_bias={3: 2.0}),
    Sampling(temperature=1.0, seed=3, top_k=5, min_tokens=3, ending_ids=frozenset(range(50))),
]
LOOKING_BACK = Sampling(temperature=1.0, seed=4, frequency_penalty=1.0)
MAX_TOKENS = 14


class _FutureStep:
    def __init__(self, step: "Future[Any]") -> None:
        self._step = step

    @property
    def requests(self) -> Any:
        return self._step.result().requests

    def wait(self) -> Any:
        return self._step.result().wait()


class AsynchronousRunner:
    """Begins steps on a thread, one after another, as a GPU does on its stream."""

    is_asynchronous = True

    def __init__(self, runner: Any) -> None:
        self.num_following = 0
        """Rows that followed tokens which nobody had read."""
        self._runner = runner
        self._stream = ThreadPoolExecutor(1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def begin(self, plan: StepPlan, arrivals: LayerArrivals | None, on_stored: OnStored | None) -> _FutureStep:
        self.num_following += sum(row.follows for row in plan.rows)
        return _FutureStep(self._stream.submit(self._runner.begin, plan, arrivals, on_stored))


class Decode:
    """One worker on a thread, and its router."""

    def __init__(self, worker: Worker, inbox: Inbox, outbox: Outbox, address: str) -> None:
        self._worker, self._inbox, self._outbox = worker, inbox, outbox
        self._me = Peer(replica=ROUTER, incarnation=Incarnation(1), address=inbox.address)
        self._decode = Peer(replica=worker.spec.replica, incarnation=Incarnation(1), address=address)
        self._num_asked = 0

    @property
    def runner(self) -> Any:
        assert self._worker._rank is not None
        return self._worker._rank.runner

    def answer(self, prompts: list[list[int]], samplings: list[Sampling], stopping: Stopping) -> list[list[Output]]:
        """Of requests that are asked together."""
        answers: dict[Room, list[Output]] = {}
        for prompt, sampling in zip(prompts, samplings, strict=True):
            self._num_asked += 1
            answers[room := Room(self._num_asked)] = []
            submit = Submit(
                room=room,
                prompt_ids=TokenIds.of(prompt),
                sampling=sampling,
                stopping=stopping,
                prefill=None,
                decode=self._decode,
                router=self._me,
            )
            self._outbox.send(self._decode.address, submit)
        num_open = len(answers)
        while num_open:
            messages = self._inbox.receive(60.0)
            assert messages, "the worker has stopped"
            for message in messages:
                assert isinstance(message, Outputs | Inquire), message
                for output in message.outputs if isinstance(message, Outputs) else ():
                    answers[output.room].append(output)
                    num_open -= output.finish is not None
        return list(answers.values())


@contextmanager
def decode(folder: Path, *, is_asynchronous: bool) -> Iterator[Decode]:
    kv = {"page_size": PAGE_SIZE, "memory_gib": (NUM_PAGES + 1) * PAGE_BYTES / 2**30, "prefix_cache": False}
    config = DeployConfig.model_validate({"kv": kv})
    worker, inbox, outbox = Worker(lone_worker(config, Role.DECODE), folder, None), Inbox(HOST), Outbox()
    row = worker.load(worker.open_store())
    assert row.layout.num_pages == NUM_PAGES
    assert worker._rank is not None
    if is_asynchronous:
        worker._rank = replace(worker._rank, runner=AsynchronousRunner(worker._rank.runner))  # type: ignore[arg-type]
    thread = threading.Thread(target=worker.run, args=[[row]])
    thread.start()
    try:
        yield Decode(worker, inbox, outbox, row.address)
    finally:
        outbox.send(row.address, Shutdown(reason="test over"))
        thread.join()
        worker.close()
        inbox.close()
        outbox.close()


def test_answers_are_the_same_a_step_ahead(tmp_path: Path) -> None:
    """Some end by length, others by a token seen a step late; one looks back; there are pages for fewer."""
    folder = make_checkpoint(tmp_path / "model", "llama")
    prompts = [[7 * number % 250 + place for place in range(5 + number)] for number in range(5)]
    found = []
    for is_asynchronous in (False, True):
        with decode(folder, is_asynchronous=is_asynchronous) as worker:
            by_length = worker.answer(prompts[:4], SAMPLINGS, Stopping(max_tokens=MAX_TOKENS))
            assert all(len(answer) == MAX_TOKENS for answer in by_length)
            stops = frozenset(answer[5].token_ids[0] for answer in by_length)
            stopped = worker.answer(prompts[:4], SAMPLINGS, Stopping(max_tokens=MAX_TOKENS, stop_token_ids=stops))
            assert all(answer[-1].finish is FinishReason.STOP for answer in stopped)
            both = worker.answer(prompts, [*SAMPLINGS, LOOKING_BACK], Stopping(max_tokens=MAX_TOKENS))
            whole_pool = worker.answer([[1] * (NUM_PAGES * PAGE_SIZE - 3)], SAMPLINGS[:1], Stopping(max_tokens=2))
            found.append([*by_length, *stopped, *both, *whole_pool])
            if is_asynchronous:
                assert worker.runner.num_following > MAX_TOKENS
    plain, ahead = found
    assert [[_told(output) for output in answer] for answer in ahead] == [
        [_told(output) for output in answer] for answer in plain
    ]
    # Steps may have other company, and so round otherwise.
    assert _logprobs(ahead) == pytest.approx(_logprobs(plain), abs=1e-4)


def _told(output: Output) -> tuple[int, list[int], FinishReason | None, int]:
    return output.first_index, output.token_ids, output.finish, len(output.logprobs)


def _logprobs(answers: list[list[Output]]) -> list[float]:
    return [told.logprob for answer in answers for output in answer for told in output.logprobs]
