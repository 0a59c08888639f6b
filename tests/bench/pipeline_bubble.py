"""How much of its time a prefill pipeline waits: python -m tests.bench.pipeline_bubble [NUM_LAYERS ...]

Computes the chunks of one prompt, sized for equal time by rates measured here, stage after stage in one process, and
lays their CPU times side by side as the stages would run them. So other work on the machine does not count.
"""

import sys
import time
from dataclasses import replace

import torch

from cluster.spec.config import ParallelConfig
from cluster.spec.strategy import Strategy
from tests.fakes.pipeline_replay import bubble, least_bubble
from workers.attention.registry import fastest_backend
from workers.cache.page_pool import PagePool
from workers.context_parallel.rates import ModelShape
from workers.cpu import use_cpu
from workers.engine.attention_context import CpExchange
from workers.engine.batch import BatchRow, build_step_batch
from workers.engine.calibration import calibrate
from workers.engine.contexts import make_context
from workers.models.config import ModelConfig
from workers.models.decoder import DecoderModel
from workers.parallel.collectives import Communicator
from workers.parallel.model_groups import ModelGroups
from workers.scheduler.step_time import even_chunk

STAGES, CHUNKS, CHUNK_TOKENS, PAGE_SIZE = 2, 8, 384, 64
CPU = torch.device("cpu")
MODEL = ModelConfig.from_mapping(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 4096,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 17,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 65536,
    },
    {},
)


class Stage:
    """One stage of a random model, with a pool for the whole prompt."""

    def __init__(self, number: int, num_layers: int) -> None:
        groups = ModelGroups(parallel=ParallelConfig(pp=STAGES), global_rank=number)
        self.model = DecoderModel(replace(MODEL, num_layers=num_layers), dtype=torch.float32, device=CPU, groups=groups)
        for parameter in self.model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        config = self.model.config
        # The first chunk may be larger than asked for: a step takes a while however little it computes.
        self.pages = list(range(2 * CHUNKS * CHUNK_TOKENS // PAGE_SIZE))
        self.pool = PagePool(
            len(self.pages), config.num_kv_heads, config.num_layers, PAGE_SIZE, config.head_dim, torch.float32
        )
        self.backend = fastest_backend(CPU, torch.float32)
        self.group = Communicator("cp")

    def chunk_lens(self) -> list[int]:
        """Of equal predicted time, as the scheduler cuts a prompt."""
        shape = ModelShape.of(self.model.config, "float32")
        chunk = even_chunk(shape, calibrate(self.model, self.pool, self.backend, self.group, shape), 1, CHUNK_TOKENS)
        lens = list[int]()
        for _ in range(CHUNKS):
            lens.append(chunk(sum(lens)))
        return lens

    def compute(self, prefix_len: int, num_tokens: int, hidden: torch.Tensor | None) -> tuple[torch.Tensor, float]:
        """Hidden states of a chunk, and the CPU time it took."""
        start_s = time.thread_time()
        batch = build_step_batch(
            [BatchRow([1] * num_tokens, prefix_len, self.pages, sampled=False)],
            Strategy.NONE,
            cp=1,
            cp_rank=0,
            page_size=PAGE_SIZE,
            trash_slot=self.pool.trash_slot,
            device=CPU,
        )
        context = make_context(batch, None, self.pool, self.backend, CpExchange(self.group))
        return self.model(batch.token_ids, batch.positions, context, hidden), time.thread_time() - start_s


def measure(num_layers: int) -> None:
    """Print the times of all chunks and the bubble."""
    stages = [Stage(number, num_layers) for number in range(STAGES)]
    lens, times_s = stages[0].chunk_lens(), []
    for number, num_tokens in enumerate(lens):
        hidden, step_s = None, []
        for stage in stages:
            hidden, time_s = stage.compute(sum(lens[:number]), num_tokens, hidden)
            step_s.append(time_s)
        times_s.append(step_s)
        print(f"chunk {number}: {num_tokens} tokens, " + ", ".join(f"{time_s * 1e3:.0f} ms" for time_s in step_s))
    found, least = bubble(times_s, STAGES + 1), least_bubble(STAGES, CHUNKS)
    points = abs(found - least) * 100
    print(f"{num_layers} layers: bubble {found:.1%}, of equal chunks {least:.1%}, difference {points:.1f} points")


def main() -> None:
    """Stages that are equal but for the last layer, and stages of which one has a layer more for it."""
    use_cpu(1)
    with torch.inference_mode():
        for num_layers in map(int, sys.argv[1:] or ("32", "17")):
            measure(num_layers)


if __name__ == "__main__":
    main()
