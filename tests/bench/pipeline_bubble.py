"""How much of its time a prefill pipeline waits: python -m tests.bench.pipeline_bubble [NUM_LAYERS ...] [--rounds N]

Two stages, each a process with one thread, compute prompts that the prefill leader cuts into eight chunks. The first
figure is what the clock saw between a prompt's first and last forward pass. The second lays the CPU times of the same
passes side by side, the median of each, as the stages would run them with nothing else on the machine.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from cluster.spec.config import DeployConfig
from cluster.spec.lifecycle import Role
from cluster.spec.registry import RankRow
from cluster.spec.sampling import Stopping
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.local_cluster import LocalCluster, Prompt
from tests.fakes.pipeline_replay import bubble, chunk_lens, least_bubble
from workers.context_parallel.step_time import even_chunk
from workers.worker import Worker

STAGES, CHUNKS, CHUNK_TOKENS = 2, 8, 384
SHAPE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 65536,
}


class Pass(NamedTuple):
    """One step's forward pass on one stage."""

    num_tokens: int
    begin_s: float
    end_s: float
    cpu_s: float


class TimedModel:
    """Stands before a stage's model; what the stage waits for is outside its calls."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.passes: list[Pass] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, token_ids: Tensor, *others: Any) -> Tensor:
        begin_s, begin_cpu_s = time.monotonic(), time.thread_time()
        hidden: Tensor = self._model(token_ids, *others)
        self.passes.append(Pass(len(token_ids), begin_s, time.monotonic(), time.thread_time() - begin_cpu_s))
        return hidden


class StageWorker(Worker):
    """A worker that times its forward passes."""

    def load(self, store_address: str) -> RankRow:
        row = super().load(store_address)
        assert self._rank is not None
        self._timed = TimedModel(self._rank.runner._model)
        self._rank.runner._model = self._timed  # type: ignore[assignment]
        return row

    def take_passes(self) -> list[Pass]:
        """Those since the last call."""
        passes, self._timed.passes = self._timed.passes, []
        return passes

    def prompt_len(self) -> int:
        """Of a prompt that the leader is to cut into CHUNKS chunks."""
        rank, config = self._rank, self.spec.config.prefill
        assert rank is not None
        chunk = even_chunk(rank.model_shape, rank.rates, 1, config.chunk_tokens, self.spec.sizes.pp)
        return sum(chunk_lens(chunk, CHUNKS))


class Round(NamedTuple):
    """One prompt."""

    lens: list[int]
    by_clock: float
    cpu_s: list[list[float]]
    """Of every chunk, by stage."""

    @classmethod
    def of(cls, stages: Sequence[Sequence[Pass]]) -> "Round":
        lens = [passed.num_tokens for passed in stages[0]]
        whole_s = stages[-1][-1].end_s - stages[0][0].begin_s
        busy_s = sum(passed.end_s - passed.begin_s for passes in stages for passed in passes)
        cpu_s = [[passed.cpu_s for passed in step] for step in zip(*stages, strict=True)]
        return cls(lens, 1 - busy_s / (len(stages) * whole_s), cpu_s)


@contextmanager
def loaded(num_layers: int) -> Iterator[LocalCluster]:
    """Stages of a random model, and one decode rank that takes what they have computed."""
    config = DeployConfig.model_validate(
        {
            "kv": {"page_size": 64, "memory_gib": 0.6, "prefix_cache": False},
            "prefill": {"parallel": {"pp": STAGES}, "chunk_tokens": CHUNK_TOKENS},
            "decode": {"max_requests": 1},
        }
    )
    cluster = LocalCluster("tests.bench.pipeline_bubble:StageWorker")
    try:
        with tempfile.TemporaryDirectory() as root:
            cluster.load(config, make_checkpoint(Path(root), "llama", num_hidden_layers=num_layers, **SHAPE))
        yield cluster
    finally:
        cluster.close()


def measure(num_layers: int, num_rounds: int) -> None:
    """Print the median times of every chunk, and both figures."""
    with loaded(num_layers) as cluster:
        prompt_len, rounds = cluster.ask(Role.PREFILL, "prompt_len")[0], list[Round]()
        for number in range(num_rounds + 1):
            tokens = random.Random(number).choices(range(SHAPE["vocab_size"]), k=prompt_len)
            cluster.ask(Role.PREFILL, "take_passes")
            with cluster.running():
                cluster.generate([Prompt(tokens, Stopping(max_tokens=1))])
            rounds.append(Round.of(cluster.ask(Role.PREFILL, "take_passes")))
    report(num_layers, rounds[1:])  # the first one warms up


def report(num_layers: int, rounds: Sequence[Round]) -> None:
    lens = rounds[0].lens
    assert all(found.lens == lens for found in rounds), "one prompt was cut otherwise than another"
    times_s = [
        [statistics.median(found.cpu_s[chunk][stage] for found in rounds) for stage in range(STAGES)]
        for chunk in range(len(lens))
    ]
    for length, step_s in zip(lens, times_s, strict=True):
        print(f"chunk of {length} tokens: " + ", ".join(f"{time_s * 1e3:.0f} ms" for time_s in step_s) + " of CPU time")
    least = least_bubble(STAGES, len(lens))
    print(f"{num_layers} layers, {len(rounds)} prompts: equal chunks wait {least:.1%}")
    for name, found in (
        ("by the clock, the median", statistics.median(found.by_clock for found in rounds)),
        ("by median CPU times", bubble(times_s, STAGES + 1)),
    ):
        print(f"    {name}: {found:.1%}, difference {(found - least) * 100:+.1f} points", flush=True)


def main() -> None:
    """Stages that are equal but for the last layer, and stages of which one has a layer more for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("num_layers", type=int, nargs="*", default=[32, 17], help="layers of both stages")
    parser.add_argument("--rounds", type=int, default=5, help="prompts")
    args = parser.parse_args()
    for num_layers in args.num_layers:
        measure(num_layers, args.rounds)


if __name__ == "__main__":
    main()
