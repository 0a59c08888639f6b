"""A very long prompt and a medium one that come together, beside a stream of short ones, on a virtual clock: the real
scheduler, steps as long as the cost model says. Prints a table: steps for the oldest of each length alone, shared
by tokens, and shared by time.

    python -m tests.bench.prefill_turns [--long 1000000] [--medium 32768] [--short 512] [--every-s 0.05] [--cp 8]
"""

import argparse
from dataclasses import dataclass, field

from cluster.spec.ids import Room
from cluster.spec.sampling import Sampled, Sampling, Stopping
from cluster.spec.strategy import StrategySetting
from workers.cache.page_allocator import PageAllocator
from workers.context_parallel.cost_model import StrategyChooser
from workers.context_parallel.rates import ModelShape, Rates
from workers.context_parallel.step_time import Chunk, even_chunk
from workers.scheduler.sequence import RequestParams, Sequence
from workers.scheduler.steps import StepLimits, StepScheduler

PAGE_SIZE = 64
CHUNK_TOKENS = 8192
SHAPE = ModelShape(
    num_layers=36,
    linear_flops=385_875_968,
    kv_flops=16_777_216,
    attention_flops=16_384,
    kv_row_bytes=4096,
    q_row_bytes=8192,
)
"""Qwen3-8B in bf16."""
RATES = Rates(
    step_s=5e-3,
    linear_flops_per_s=5e14,
    attention_flops_per_s=4e14,
    run_s=5e-6,
    row_s=1e-9,
    exchange_s=3e-5,
    exchange_bytes_per_s=2e11,
)
"""Round numbers of one H200 with NVLink."""


@dataclass
class Prefill:
    """One replica on a virtual clock."""

    steps: StepScheduler
    now_s: float = 0.0
    arrived_s: dict[Room, float] = field(default_factory=dict)
    took_s: dict[Room, float] = field(default_factory=dict)

    def add(self, num_tokens: int, arrived_s: float) -> Room:
        room = Room(len(self.arrived_s))
        self.arrived_s[room] = arrived_s
        self.steps.add(
            Sequence(
                RequestParams(
                    room=room,
                    prompt_len=num_tokens,
                    sampling=Sampling(),
                    stopping=Stopping(max_tokens=1),
                    max_len=num_tokens + 1,
                ),
                tokens=[0] * num_tokens,
            )
        )
        return room

    def step(self) -> None:
        plan = self.steps.next_plan()
        assert plan is not None
        assert plan.estimate_s is not None
        self.now_s += plan.estimate_s
        for sequence in self.steps.commit(
            plan, {row.room: Sampled(token_id=0) for row in plan.scheduled if row.samples}
        ):
            self.took_s[sequence.room] = self.now_s - self.arrived_s[sequence.room]
            self.steps.retire(sequence.room)


def simulate(args: argparse.Namespace, oldest_share: float, chunk: Chunk | None) -> tuple[float, ...]:
    """Times to the end of the long and the medium prompt, and quantiles of that of the short ones that came before."""
    limits = StepLimits(PAGE_SIZE, CHUNK_TOKENS, 64, oldest_share)
    allocator = PageAllocator(2 * args.long // PAGE_SIZE)
    chooser = StrategyChooser(setting=StrategySetting.ZIGZAG, cp=args.cp, shape=SHAPE, rates=RATES)
    prefill = Prefill(StepScheduler(allocator, limits, chooser, chunk))
    long, medium = prefill.add(args.long, 0.0), prefill.add(args.medium, 0.0)
    shorts: list[Room] = []
    while long not in prefill.took_s or len(prefill.took_s) < len(prefill.arrived_s):
        while long not in prefill.took_s and (arrives_s := args.every_s * (1 + len(shorts))) <= prefill.now_s:
            shorts.append(prefill.add(args.short, arrives_s))
        prefill.step()
    times_s = sorted(prefill.took_s[short] for short in shorts)
    took_s = prefill.took_s
    return took_s[long], took_s[medium], times_s[len(times_s) // 2], times_s[len(times_s) * 99 // 100], times_s[-1]


def main() -> None:
    """Simulate all three and print them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--long", type=int, default=1_000_000, help="tokens of the long prompt")
    parser.add_argument("--medium", type=int, default=32_768, help="tokens of the medium prompt")
    parser.add_argument("--short", type=int, default=512, help="tokens of each short prompt")
    parser.add_argument("--every-s", type=float, default=0.05, help="seconds between two short prompts")
    parser.add_argument("--cp", type=int, default=8, help="context parallel ranks")
    args = parser.parse_args()
    print("| steps | long prompt | medium prompt | short p50 | short p99 | short max |\n|---|---|---|---|---|---|")
    for name, share, chunk in (
        ("the oldest of each length (`oldest_share: 1`)", 1.0, None),
        ("shared by tokens", 0.25, None),
        ("shared by time (the default, `oldest_share: 0.25`)", 0.25, even_chunk(SHAPE, RATES, args.cp, CHUNK_TOKENS)),
    ):
        long_s, *others_s = simulate(args, share, chunk)
        print(f"| {name} | {long_s:.1f} s | " + " | ".join(f"{value:.2f} s" for value in others_s) + " |", flush=True)


if __name__ == "__main__":
    main()
