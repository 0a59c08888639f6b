"""`baton bench hicache`: time to first token where a part of a prompt is cached, by tier. Loads no torch.

One prefill and one decode replica in plain processes. Each round measures a prompt that nothing is cached of as well,
so that a machine whose speed drifts slows both.
"""

import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from cluster.spec.config import DeployConfig
from cluster.spec.errors import UserError
from cluster.spec.sampling import Sampling, Stopping
from cluster.spec.tiers import CachedTokens, Tier
from workers.local import Answer, LocalCluster, Prompt
from workers.models.registry import read_model_config
from workers.worker_process import RemoteError

_MOST_GIB = 65536
"""As the deploy YAML has it."""
_MOST_ATTEMPTS = 100
"""To find a prompt in its tier; copies are made beside the work, so that the first ones may come too early."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSizes:
    """Of the prefill replica: its ranks, and the memory of each. Raises UserError when a value makes no sense."""

    cp: int = 1
    page_size: int = 64
    kv_gib: float = 1.0
    host_gib: float = 1.0

    def __post_init__(self) -> None:
        if self.cp < 1:
            raise UserError(f"--cp: got {self.cp}; allowed: 1 or more")
        for option, gib in (("--kv-gib", self.kv_gib), ("--host-gib", self.host_gib)):
            if not 0 < gib <= _MOST_GIB:
                raise UserError(f"{option}: got {gib:g}; allowed: a number over 0, {_MOST_GIB} at most")

    def config(self, lowest: Tier, folder: Path) -> DeployConfig:
        """Without the tiers below one; storage is files in the folder."""
        storage = {"backend": "files", "folder": str(folder), "prefetch": "wait_complete", "prefetch_min_tokens": 1}
        hicache: dict[str, object] = {} if lowest is Tier.DEVICE else {"host_gib": self.host_gib}
        if lowest is Tier.STORAGE:
            hicache["storage"] = storage
        kv = {"page_size": self.page_size, "memory_gib": self.kv_gib}
        return DeployConfig.model_validate({"kv": kv, "prefill": {"parallel": {"cp": self.cp}}, "hicache": hicache})


@dataclass(frozen=True, slots=True, kw_only=True)
class HicacheBench:
    """One benchmark run. Raises UserError when a value makes no sense."""

    prompt_len: int = 16384
    hits: tuple[int, ...] = (0, 50, 90, 100)
    """Cached parts of the prompt, in percent; 0 shows what two prompts of which nothing is cached differ by."""
    tiers: tuple[Tier, ...] = tuple(Tier)
    num_rounds: int = 5
    sizes: TierSizes = TierSizes()

    def __post_init__(self) -> None:
        if not all(0 <= hit <= 100 for hit in self.hits):
            raise UserError(f"--hits: got {','.join(map(str, self.hits))}; allowed: percents from 0 to 100")
        shortest = 2 * self.sizes.page_size * 100 // min(filter(None, self.hits), default=100)
        if self.prompt_len < shortest:
            raise UserError(f"--prompt-len: got {self.prompt_len}; allowed: {shortest} or more, to hit whole pages")
        if self.num_rounds < 1:
            raise UserError(f"--rounds: got {self.num_rounds}; allowed: 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class HicacheResult:
    """Medians over the rounds."""

    prompt_len: int
    cached_len: int
    tier: Tier
    ttft_s: float
    cold_s: float
    """Of prompts as long that nothing was cached of, in the same rounds."""
    share: float
    """Of the time that the whole prompt takes."""


def run_hicache_bench(bench: HicacheBench, model_folder: Path) -> Iterator[HicacheResult]:
    """A result for each tier and hit."""
    vocab_size = read_model_config(model_folder).vocab_size
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        config = bench.sizes.config(Tier.STORAGE, Path(folder))
        # Decode caches nothing, so that all prompts are handed over whole.
        without = bench.sizes.config(Tier.DEVICE, Path(folder))
        decode = without.model_copy(update={"kv": without.kv.model_copy(update={"prefix_cache": False})})
        with closing(LocalCluster()) as cluster:
            cluster.load(config, model_folder)
            with cluster.running(config, decode):
                run = _Run(bench, cluster, vocab_size)
                for tier in bench.tiers:
                    for hit in bench.hits:
                        yield run.measure(tier, hit)


class _Run:
    def __init__(self, bench: HicacheBench, cluster: LocalCluster, vocab_size: int) -> None:
        self._bench = bench
        self._cluster = cluster
        self._vocab_size = vocab_size
        self._random = random.Random(1)

    def measure(self, tier: Tier, hit: int) -> HicacheResult:
        """Ask prompts with the same beginning until it came from its tier in every round."""
        bench = self._bench
        # The last token is always computed, in a page of its own.
        num_pages = min(bench.prompt_len * hit // 100, bench.prompt_len - 1) // bench.sizes.page_size
        cached_len = num_pages * bench.sizes.page_size
        prefix = self._draw(cached_len)
        wanted = CachedTokens(
            total=cached_len,
            host=cached_len if tier is Tier.HOST else 0,
            storage=cached_len if tier is Tier.STORAGE else 0,
        )
        self._ask(prefix + self._draw(bench.prompt_len - cached_len))
        times, cold_times = list[float](), list[float]()
        for _ in range(_MOST_ATTEMPTS):
            self._cluster.flush(*tuple(Tier)[: tuple(Tier).index(tier)])
            answer, seconds = self._ask(prefix + self._draw(bench.prompt_len - cached_len))
            if answer.cached == wanted:
                times.append(seconds)
                cold_times.append(self._ask(self._draw(bench.prompt_len))[1])
            if len(times) == bench.num_rounds:
                break
        else:
            raise RemoteError(f"{cached_len} tokens never came from {tier}, at last {answer.cached}")
        return HicacheResult(
            prompt_len=bench.prompt_len,
            cached_len=cached_len,
            tier=tier,
            ttft_s=median(times),
            cold_s=median(cold_times),
            share=median(times) / median(cold_times),
        )

    def _ask(self, prompt: list[int]) -> tuple[Answer, float]:
        """The first token of a prompt, and how long it took."""
        start_s = time.monotonic()
        (answer,) = self._cluster.answer([Prompt(prompt, Stopping(max_tokens=1), Sampling())])
        return answer, time.monotonic() - start_s

    def _draw(self, length: int) -> list[int]:
        return [self._random.randrange(3, self._vocab_size) for _ in range(length)]
