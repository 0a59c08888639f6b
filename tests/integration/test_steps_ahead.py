"""A decode worker with an asynchronous device plans one step ahead, and answers like one that waits for every step."""

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from cluster.channel import Inbox, Outbox
from cluster.spec.config import DeployConfig
from cluster.spec.ids import ROUTER, Incarnation, Peer, Role, Room
from cluster.spec.messages import Inquire, Output, Outputs, Submit
from cluster.spec.sampling import FinishReason, Sampling, Stopping
from cluster.spec.step_messages import Shutdown
from cluster.spec.wire import TokenIds
from tests.fakes.asynchronous_worker import AsynchronousWorker
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.local_cluster import Prompt
from tests.fakes.local_engine import LocalEngine, Oracle
from tests.fakes.worker_specs import lone_worker
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


class Decode:
    """One worker in a thread, and its router."""

    def __init__(self, worker: Worker, inbox: Inbox, outbox: Outbox, address: str) -> None:
        self.worker, self._inbox, self._outbox = worker, inbox, outbox
        self._me = Peer(replica=ROUTER, incarnation=Incarnation(1), address=inbox.address)
        self._decode = Peer(replica=worker.spec.replica, incarnation=Incarnation(1), address=address)
        self._num_asked = 0

    def answer(self, prompts: list[list[int]], samplings: list[Sampling], stopping: Stopping) -> list[list[Output]]:
        """Return the outputs of requests that are sent together."""
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
    make = AsynchronousWorker if is_asynchronous else Worker
    worker, inbox, outbox = make(lone_worker(config, Role.DECODE), folder, None), Inbox(HOST), Outbox()
    record = worker.load(worker.open_store())
    assert record.layout.num_pages == NUM_PAGES
    thread = threading.Thread(target=worker.run, args=[[record]])
    thread.start()
    try:
        yield Decode(worker, inbox, outbox, record.address)
    finally:
        outbox.send(record.address, Shutdown())
        thread.join()
        worker.close()
        inbox.close()
        outbox.close()


def test_answers_are_the_same_a_step_ahead(tmp_path: Path) -> None:
    """Some requests end by length, others with a token seen a step late. One has penalties, and pages are scarce."""
    folder = make_checkpoint(tmp_path / "model", "llama")
    prompts = [[7 * number % 250 + index for index in range(5 + number)] for number in range(5)]
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
            if isinstance(worker.worker, AsynchronousWorker):
                assert worker.worker.num_following() > MAX_TOKENS
    plain, ahead = found
    assert [[_summary(output) for output in answer] for answer in ahead] == [
        [_summary(output) for output in answer] for answer in plain
    ]
    # Batches may differ, and with them the rounding.
    assert _logprobs(ahead) == pytest.approx(_logprobs(plain), abs=1e-4)


def _summary(output: Output) -> tuple[int, list[int], FinishReason | None, int]:
    return output.first_index, output.token_ids, output.finish, len(output.logprobs)


def _logprobs(answers: list[list[Output]]) -> list[float]:
    return [entry.logprob for answer in answers for output in answer for entry in output.logprobs]


@pytest.mark.parametrize("parallel", [{"tp": 2}, {"dp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_ranks_that_do_not_sample_follow_as_well(tmp_path: Path, parallel: dict[str, int]) -> None:
    """Greedy tokens equal transformers'. Requests start and end in different steps on each DP rank."""
    folder = make_checkpoint(tmp_path / "model", "llama")
    config = DeployConfig.model_validate(
        {
            "kv": {"page_size": PAGE_SIZE, "memory_gib": 0.001},
            "decode": {"parallel": parallel},
        }
    )
    prompts = [[7 * number % 250 + index for index in range(5 + number)] for number in range(6)]
    oracle = Oracle(folder, MAX_TOKENS)
    asked = [Prompt(prompt, Stopping(max_tokens=MAX_TOKENS - number)) for number, prompt in enumerate(prompts)]
    with closing(LocalEngine("tests.fakes.asynchronous_worker:AsynchronousWorker")) as engine:
        with engine.running(folder, config) as cluster:
            found = cluster.generate(asked)
        num_following = engine.ask(Role.DECODE, "num_following")
    assert found == [oracle.tokens(prompt)[: len(answer)] for prompt, answer in zip(prompts, found, strict=True)]
    assert [len(answer) for answer in found] == [MAX_TOKENS - number for number in range(6)]
    assert all(count > MAX_TOKENS // 2 for count in num_following), num_following
