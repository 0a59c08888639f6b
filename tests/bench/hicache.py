"""Effect of each cache tier: one prefill and one decode replica in plain processes, one JSON object per line.

    python -m tests.bench.hicache ttft [--prompt-len 16384] [--hits 0 50 90 100] [--rounds 3]
    python -m tests.bench.hicache conversations [--conversations 12] [--turns 4] [--prompt-len 2048]
    python -m tests.bench.hicache trace FILE [--trace-scale 0.0625] [--num-requests 1000]

``ttft`` alternates prompts of which a part is cached in a tier with uncached prompts, and reports their times.
``conversations`` and ``trace`` answer the same requests with the device cache alone, with a host tier, and with storage
in addition, and report hit rates.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from cluster.bench.dataset import read_trace
from cluster.bench.workload import random_tokens, trace_workload
from cluster.spec.config import DeployConfig
from cluster.spec.sampling import Stopping
from cluster.spec.tiers import CachedTokens, Tier
from tests.fakes.local_cluster import Answer, LocalCluster, Prompt
from tests.fakes.traces import prompt_ids, unbounded_hits
from workers.models.registry import read_model_config
from workers.models.resolve import resolve_model

PAGE_SIZE = 64
ANSWER_LEN, AT_ONCE = 16, 4
MOST_ATTEMPTS = 100
"""Attempts to find a prompt in its tier. Copies are made in the background, so the first attempts may be too early."""

T = TypeVar("T")
Ask = Callable[[list[list[int]], list[int]], list[list[int]]]
"""Function that returns answers of given lengths to prompts that are sent together."""


def config_of(args: argparse.Namespace, lowest: Tier, folder: Path) -> DeployConfig:
    """Return a deployment with tiers down to the lowest one. Storage is a folder of files."""
    storage = {"backend": "files", "folder": str(folder), "prefetch": "wait_complete"}
    hicache: dict[str, object] = {} if lowest is Tier.DEVICE else {"host_gib": args.host_gib}
    if lowest is Tier.STORAGE:
        hicache["storage"] = storage
    kv = {"page_size": PAGE_SIZE, "memory_gib": args.kv_gib}
    return DeployConfig.model_validate({"kv": kv, "prefill": {"parallel": {"cp": args.cp}}, "hicache": hicache})


def by_tier(args: argparse.Namespace, cluster: LocalCluster, model: Path, scratch: Path) -> Iterator[dict[str, Any]]:
    """Yield the time to first token for each tier and cached share."""
    config, rng = config_of(args, Tier.STORAGE, scratch), random.Random(1)
    # Decode caches nothing, so that all prompts are handed over completely.
    decode = config_of(args, Tier.DEVICE, scratch)
    decode = decode.model_copy(update={"kv": decode.kv.model_copy(update={"prefix_cache": False})})
    vocab_size = read_model_config(model).vocab_size

    def draw(length: int) -> list[int]:
        return [rng.randrange(3, vocab_size) for _ in range(length)]

    cluster.load(config, model)
    with cluster.running(config, decode):
        for tier in Tier:
            for hit in args.hits:
                # The last token is always computed.
                cached_len = min(args.prompt_len * hit // 100, args.prompt_len - 1) // PAGE_SIZE * PAGE_SIZE
                prefix = draw(cached_len)
                host, storage = (cached_len if tier is lower else 0 for lower in (Tier.HOST, Tier.STORAGE))
                wanted = CachedTokens(total=cached_len, host=host, storage=storage)
                first_token(cluster, prefix + draw(args.prompt_len - cached_len))
                times_s, cold_s = list[float](), list[float]()
                for _ in range(MOST_ATTEMPTS):
                    cluster.flush(*tuple(Tier)[: tuple(Tier).index(tier)])
                    answer, seconds = first_token(cluster, prefix + draw(args.prompt_len - cached_len))
                    if answer.cached == wanted:
                        times_s.append(seconds)
                        cold_s.append(first_token(cluster, draw(args.prompt_len))[1])
                    if len(times_s) == args.rounds:
                        break
                else:
                    raise SystemExit(f"{cached_len} tokens never came from {tier}, at last {answer.cached}")
                ttft_s, computed_s = median(times_s), median(cold_s)
                figures = {"ttft_s": ttft_s, "computed_s": computed_s, "share": ttft_s / computed_s}
                yield {"tier": tier, "prompt_len": args.prompt_len, "cached_len": cached_len, **figures}


def first_token(cluster: LocalCluster, prompt: list[int]) -> tuple[Answer, float]:
    start_s = time.monotonic()
    (answer,) = cluster.answer([Prompt(prompt, Stopping(max_tokens=1))])
    return answer, time.monotonic() - start_s


class Count:
    """Client that counts how many prompt tokens were cached."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self.cached = CachedTokens()
        self.seconds = 0.0
        self.known: list[list[int]] = []
        """Sequences that an unbounded cache would store: prompts, alone and with their answers."""
        self.prompt_lens: list[int] = []
        """Length of each prompt, or 0 for sequences with answers, which are not requested."""

    def ask(self, prompts: list[list[int]], output_lens: list[int]) -> list[list[int]]:
        sent = [Prompt(prompt, Stopping(max_tokens=num)) for prompt, num in zip(prompts, output_lens, strict=True)]
        start_s = time.monotonic()
        answers = self._cluster.answer(sent)
        self.seconds += time.monotonic() - start_s
        self.known += map(list, prompts)
        self.prompt_lens += map(len, prompts)
        # The last token's KV is never computed.
        self.known += [[*prompt, *answer.token_ids[:-1]] for prompt, answer in zip(prompts, answers, strict=True)]
        self.prompt_lens += [0] * len(prompts)
        self.cached = sum((answer.cached for answer in answers), self.cached)
        return [answer.token_ids for answer in answers]


def hit_rates(args: argparse.Namespace, cluster: LocalCluster, model: Path, scratch: Path) -> Iterator[dict[str, Any]]:
    """Yield the hit rates of the same requests for each lowest tier."""
    device_rate = 0.0
    for tier in Tier:
        count = Count(cluster)
        cluster.load(config_of(args, tier, scratch), model)
        with cluster.running():
            # The first request of a process is slower than others.
            cluster.generate([Prompt(random_tokens("warm-up", PAGE_SIZE), Stopping(max_tokens=2))])
            args.workload(args, count.ask)
        num_tokens, cached = sum(count.prompt_lens), count.cached
        hits = zip(unbounded_hits(count.known, PAGE_SIZE), count.prompt_lens, strict=True)
        device_rate = device_rate or num_tokens / count.seconds
        yield {
            "lowest_tier": tier,
            "prompt_tokens": num_tokens,
            "seconds": count.seconds,
            "hit_rate": cached.total / num_tokens,
            "host_rate": cached.host / num_tokens,
            "storage_rate": cached.storage / num_tokens,
            "unbounded_hit_rate": sum(hit for hit, prompt_len in hits if prompt_len) / num_tokens,
            "gain": num_tokens / count.seconds / device_rate,
        }


def talk(args: argparse.Namespace, ask: Ask) -> None:
    """Run conversations turn by turn. Each prompt contains the conversation so far and something new."""
    said: list[list[int]] = [[] for _ in range(args.conversations)]
    for turn in range(args.turns):
        num_new = args.prompt_len // args.turns - (ANSWER_LEN if turn else 0)
        for number, conversation in enumerate(said):
            conversation += random_tokens(f"turn {turn} of {number}", num_new)
        for group in groups(said):
            answers = ask(group, [ANSWER_LEN] * len(group))
            for conversation, answer in zip(group, answers, strict=True):
                conversation += answer


def replay(args: argparse.Namespace, ask: Ask) -> None:
    """Send a trace's requests as fast as they are answered."""
    entries = read_trace(args.trace, args.num_requests)
    for group in groups(trace_workload(entries, scale=args.trace_scale).requests):
        ask([prompt_ids(request) for request in group], [request.output_len for request in group])


def groups(items: Sequence[T]) -> Iterator[list[T]]:
    return (list(items[first : first + AT_ONCE]) for first in range(0, len(items), AT_ONCE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--model", default="recall")
    common.add_argument("--cp", type=int, default=1, help="CP ranks of the prefill replica")
    common.add_argument("--kv-gib", type=float, default=1.0, help="page pool of each worker; room for two prompts")
    common.add_argument("--host-gib", type=float, default=1.0, help="host memory of each worker")
    commands = parser.add_subparsers(required=True)
    ttft = commands.add_parser("ttft", parents=[common])
    ttft.add_argument("--prompt-len", type=int, default=16384)
    ttft.add_argument("--hits", type=int, nargs="+", default=[0, 50, 90, 100], help="cached percentages")
    ttft.add_argument("--rounds", type=int, default=5)
    ttft.set_defaults(measure=by_tier)
    conversations = commands.add_parser("conversations", parents=[common])
    conversations.add_argument("--conversations", type=int, default=12)
    conversations.add_argument("--turns", type=int, default=4)
    conversations.add_argument("--prompt-len", type=int, default=2048, help="of the last turn, answers included")
    conversations.set_defaults(measure=hit_rates, workload=talk)
    trace = commands.add_parser("trace", parents=[common])
    trace.add_argument("trace", type=Path)
    trace.add_argument("--trace-scale", type=float, default=1.0)
    trace.add_argument("--num-requests", type=int)
    trace.set_defaults(measure=hit_rates, workload=replay)
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="baton-bench-") as scratch,
        closing(LocalCluster("tests.fakes.tier_workers:EagerWorker")) as cluster,
    ):
        for figures in args.measure(args, cluster, resolve_model(args.model), Path(scratch)):
            print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
