"""`baton bench hicache` with prompts that come back: what each tier finds of them, and how much faster that is.

The same requests are sent to clusters of one prefill and one decode replica in plain processes: with the device cache
alone, with host memory below it, and with storage below that. Loads no torch.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, TypeVar

from cluster.bench.hicache import TierSizes
from cluster.bench.trace import EndlessCache, TraceWorkload
from cluster.bench.workload import check_least, random_tokens
from cluster.spec.sampling import Stopping
from cluster.spec.tiers import CachedTokens, Tier
from workers.local import LocalCluster, Prompt
from workers.models.registry import read_model_config

T = TypeVar("T")
Ask = Callable[[Sequence[Sequence[int]], Sequence[int]], list[list[int]]]
"""Answers of given lengths to prompts that come at once."""


class TierWorkload(Protocol):
    """Requests some of which begin as earlier ones did."""

    def run(self, ask: Ask, vocab_size: int) -> None:
        """Ask everything, in an order that is always the same."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """Several side by side; each turn's prompt is all that was said before and something new."""

    num_conversations: int
    num_turns: int
    prompt_len: int
    """Of the last turn; each adds an equal part, answers included."""
    answer_len: int = 16
    concurrency: int = 4

    def __post_init__(self) -> None:
        check_least("--conversations", self.num_conversations, 1)
        check_least("--turns", self.num_turns, 1)
        check_least("--prompt-len", self.prompt_len, self.num_turns * (self.answer_len + 1))

    def run(self, ask: Ask, vocab_size: int) -> None:
        """All take their first turn, then all their second."""
        said: list[list[int]] = [[] for _ in range(self.num_conversations)]
        for turn in range(self.num_turns):
            num_new = self.prompt_len // self.num_turns - (self.answer_len if turn else 0)
            for number, conversation in enumerate(said):
                conversation += random_tokens(f"turn {turn} of {number}", vocab_size, num_new)
            for group in _groups(said, self.concurrency):
                answers = ask(group, [self.answer_len] * len(group))
                for conversation, answer in zip(group, answers, strict=True):
                    conversation += answer


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRequests:
    """Those of a trace, one after another as fast as they are answered."""

    trace: TraceWorkload
    concurrency: int = 4

    def run(self, ask: Ask, vocab_size: int) -> None:
        """So many at once."""
        for group in _groups(replace(self.trace, vocab_size=vocab_size).requests(), self.concurrency):
            ask([request.make_prompt() for request in group], [request.output_len for request in group])


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """What became of all requests where this was the lowest tier."""

    lowest_tier: Tier
    prompt_tokens: int
    seconds: float
    hit_rate: float
    """Part of the prompt tokens that were not computed."""
    host_rate: float
    """Part of them that came from host memory."""
    storage_rate: float
    best_hit_rate: float
    """Of a cache that never forgets a prompt or an answer."""
    gain: float
    """Prompt tokens a second, in those of the device cache alone."""


@dataclass(slots=True)
class _Count:
    cluster: LocalCluster
    best: EndlessCache
    prompt_tokens: int = 0
    best_tokens: int = 0
    seconds: float = 0.0
    cached: CachedTokens = field(default_factory=CachedTokens)

    @property
    def rate(self) -> float:
        """Prompt tokens a second."""
        return self.prompt_tokens / self.seconds

    def result(self, lowest_tier: Tier, device_rate: float) -> LoadResult:
        return LoadResult(
            lowest_tier=lowest_tier,
            prompt_tokens=self.prompt_tokens,
            seconds=self.seconds,
            hit_rate=self.cached.total / self.prompt_tokens,
            host_rate=self.cached.host / self.prompt_tokens,
            storage_rate=self.cached.storage / self.prompt_tokens,
            best_hit_rate=self.best_tokens / self.prompt_tokens,
            gain=self.rate / device_rate,
        )

    def ask(self, prompts: Sequence[Sequence[int]], output_lens: Sequence[int]) -> list[list[int]]:
        asked = [Prompt(prompt, Stopping(max_tokens=num)) for prompt, num in zip(prompts, output_lens, strict=True)]
        start_s = time.monotonic()
        answers = self.cluster.answer(asked)
        self.seconds += time.monotonic() - start_s
        self.prompt_tokens += sum(map(len, prompts))
        self.best_tokens += sum(self.best.take(prompt) for prompt in prompts)
        for prompt, answer in zip(prompts, answers, strict=True):
            self.best.take([*prompt, *answer.token_ids[:-1]])  # the last token's KV is never computed
            self.cached += answer.cached
        return [answer.token_ids for answer in answers]


def _groups(items: list[T], size: int) -> Iterator[list[T]]:
    return (items[first : first + size] for first in range(0, len(items), size))


def run_load_bench(sizes: TierSizes, workload: TierWorkload, model_folder: Path) -> Iterator[LoadResult]:
    """A result for each lowest tier, the device first."""
    vocab_size = read_model_config(model_folder).vocab_size
    device_rate: float | None = None
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder, closing(LocalCluster()) as cluster:
        for tier in Tier:
            cluster.load(sizes.config(tier, Path(folder)), model_folder)
            with cluster.running():
                # The first request of a process is slower than others.
                warmup = random_tokens("warm-up", vocab_size, sizes.page_size)
                cluster.generate([Prompt(warmup, Stopping(max_tokens=2))])
                count = _Count(cluster, EndlessCache(sizes.page_size))
                workload.run(count.ask, vocab_size)
            device_rate = device_rate or count.rate
            yield count.result(tier, device_rate)
