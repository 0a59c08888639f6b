"""What a decode step costs beside its forward pass: the real worker over a model that only takes time.

    python -m tests.bench.step_cost [--batch 1 64] [--steps 300] [--forward-ms 4] [--vocab 4096]

A line for each batch size: 10th, 50th and 90th percentile of the time between two forward passes, and of the CPU time
that the worker's thread had in it, in milliseconds. Drawing tokens is part of it, and grows with the vocabulary.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cluster.channel import Inbox, Outbox
from cluster.spec.config import DeployConfig
from cluster.spec.ids import ROUTER, Incarnation, draw_room
from cluster.spec.lifecycle import Role
from cluster.spec.messages import Inquire, Outputs, Submit
from cluster.spec.peer import Peer
from cluster.spec.registry import RankRow
from cluster.spec.sampling import Sampling, Stopping
from cluster.spec.step_messages import Shutdown
from cluster.spec.token_ids import TokenIds
from cluster.spec.worker_spec import WorkerSpec
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.local_cluster import HOST
from tests.fakes.worker_specs import lone_worker
from workers.layers.context import AttentionContext
from workers.process import WorkerProcess
from workers.worker import Worker

PROMPT_LEN = 8


class Moment(NamedTuple):
    """Clock and thread time."""

    wall_s: float
    cpu_s: float


def now() -> Moment:
    return Moment(time.perf_counter(), time.thread_time())


class FixedTimeModel:
    """Stands before a real model, and sleeps instead."""

    def __init__(self, model: Any, forward_s: float, vocab_size: int) -> None:
        self._model = model
        self._forward_s = forward_s
        self._logits = torch.randn(1024, vocab_size)
        self.passes: list[tuple[int, Moment, Moment]] = []
        """Tokens, begin and end of each."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, token_ids: Tensor, _positions: Tensor, context: AttentionContext, *_: object) -> Tensor:
        begin = now()
        time.sleep(self._forward_s)
        self.passes.append((len(token_ids), begin, now()))
        wanted = context.last.wanted
        return torch.zeros(len(token_ids if wanted is None else wanted), self._model.config.hidden_size)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._logits[: len(hidden)]


class SleepingWorker(Worker):
    """A worker whose model sleeps."""

    def replace_model(self, forward_s: float, vocab_size: int) -> None:
        assert self._rank is not None
        self._model = FixedTimeModel(self._rank.runner._model, forward_s, vocab_size)
        self._rank.runner._model = self._model  # type: ignore[assignment]  # stands before the real one

    def gaps(self, batch: int) -> list[Moment]:
        """Between each two full steps; forgets them."""
        passes, self._model.passes = self._model.passes, []
        pairs = itertools.pairwise(passes)
        return [
            Moment(begin.wall_s - end.wall_s, begin.cpu_s - end.cpu_s)
            for (before, _, end), (after, begin, _) in pairs
            if before == after == batch
        ]


def spec_of() -> WorkerSpec:
    config = DeployConfig.model_validate(
        {"kv": {"page_size": 16, "memory_gib": 0.1}, "decode": {"max_requests": 1024, "chunk_tokens": 16384}}
    )
    return lone_worker(config, Role.DECODE)


class Bench:
    """The worker in a process of its own, and this one as its router."""

    def __init__(self, folder: Path, forward_s: float, vocab_size: int) -> None:
        self._inbox, self._outbox = Inbox(HOST), Outbox()
        self._worker = WorkerProcess("tests.bench.step_cost:SleepingWorker")
        self._call("make", spec_of(), folder, None)
        self._row: RankRow = self._call("load", self._call("open_store"))
        self._call("replace_model", forward_s, vocab_size)

    def measure(self, batch: int, num_steps: int, sampling: Sampling) -> list[Moment]:
        """Run a batch of requests together."""
        self._worker.call("run", [self._row])
        decode = Peer(replica=self._row.replica, incarnation=Incarnation(1), address=self._row.address)
        router = Peer(replica=ROUTER, incarnation=Incarnation(1), address=self._inbox.address)
        for number in range(batch):
            submit = Submit(
                room=draw_room(),
                prompt_ids=TokenIds.of([number % 200] * PROMPT_LEN),
                sampling=sampling,
                stopping=Stopping(max_tokens=num_steps),
                prefill=None,
                decode=decode,
                router=router,
            )
            self._outbox.send(decode.address, submit)
        num_open = batch
        while num_open:
            messages = self._inbox.receive(10.0)
            if not messages:
                raise SystemExit(f"the worker has stopped: {self._worker.result()}")
            for message in messages:
                assert isinstance(message, Outputs | Inquire), message
                outputs = message.outputs if isinstance(message, Outputs) else []
                num_open -= sum(output.finish is not None for output in outputs)
        self._outbox.send(decode.address, Shutdown(reason="measured"))
        self._worker.result()
        gaps: list[Moment] = self._call("gaps", batch)
        return gaps

    def close(self) -> None:
        self._worker.close()
        self._inbox.close()
        self._outbox.close()

    def _call(self, method: str, *args: Any) -> Any:
        self._worker.call(method, *args)
        return self._worker.result()


def _told(ms: list[float]) -> str:
    deciles = statistics.quantiles(ms, n=10)
    return " / ".join(f"{deciles[place]:.2f}" for place in (0, 4, 8))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--forward-ms", type=float, default=4.0)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        bench = Bench(
            make_checkpoint(Path(root, "model"), "qwen3", dtype=torch.bfloat16), args.forward_ms / 1e3, args.vocab
        )
        for batch in args.batch:
            gaps = bench.measure(batch, args.steps, Sampling(temperature=args.temperature, seed=1))
            wall, cpu = (_told([1e3 * gap[kind] for gap in gaps]) for kind in (0, 1))
            print(f"batch {batch:4}: wall {wall} ms, thread {cpu} ms, of {len(gaps)} steps")
        bench.close()


if __name__ == "__main__":
    main()
