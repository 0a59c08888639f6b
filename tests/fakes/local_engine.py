"""Local replicas that serve case after case, small models for them, and transformers' answers."""

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from cluster.spec.config import DeployConfig
from cluster.spec.ids import Role
from cluster.spec.registry import TransferMode
from cluster.spec.sampling import Sampling, Stopping
from cluster.spec.strategy import CpMode, PassingSetting
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.local_cluster import Answer, LocalCluster, Prompt
from tests.fakes.stable_ties import break_ties_by_position
from workers.bench.process import WORKER


class KvWay(NamedTuple):
    """Placement of KV on CP ranks, the way in which it meets their queries, and the sending ranks."""

    mode: CpMode = CpMode.GATHER
    passing: PassingSetting = PassingSetting.AUTO
    sends: TransferMode = TransferMode.ALL_RANKS

    def __str__(self) -> str:
        return "-".join(self)


KV_WAYS = [
    KvWay(sends=TransferMode.RANK0),
    KvWay(),
    KvWay(CpMode.RING, PassingSetting.PASS_KV),
    KvWay(CpMode.RING, PassingSetting.PASS_Q),
]
"""Every combination that `baton plan` allows."""


NUM_LOGPROBS = 20
"""Number of compared log-probabilities per token."""


class Oracle:
    """Greedy tokens and log-probabilities from transformers."""

    def __init__(self, folder: Path, num_tokens: int) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        break_ties_by_position(self.model)
        self._num_tokens = num_tokens
        self._cached = cache(self._generate)

    def tokens(self, prompt: Sequence[int]) -> list[int]:
        """Return the output for a prompt."""
        return list(self._cached(tuple(prompt))[0])

    def logprobs(self, prompt: Sequence[int]) -> Tensor:
        """Return the vocabulary's log-probabilities at every output position, ``[num_tokens, vocabulary]``."""
        return self._cached(tuple(prompt))[1]

    def check(self, prompt: Sequence[int], answer: Answer, note: str = "") -> None:
        """Check that tokens equal transformers' and log-probabilities differ by at most 1e-4."""
        assert answer.token_ids == self.tokens(prompt), note
        top_ids = torch.tensor([entry.top_ids for entry in answer.logprobs])
        top_logprobs = torch.tensor([entry.top_logprobs for entry in answer.logprobs])
        assert top_ids.shape == (self._num_tokens, NUM_LOGPROBS), note
        torch.testing.assert_close(top_logprobs, self.logprobs(prompt).gather(1, top_ids), atol=1e-4, rtol=0)

    def _generate(self, prompt: tuple[int, ...]) -> tuple[list[int], Tensor]:
        with torch.inference_mode():
            generated = self.model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                do_sample=False,
                max_new_tokens=self._num_tokens,
                return_dict_in_generate=True,
                output_logits=True,
            )
        answer: list[int] = generated.sequences[0, len(prompt) :].tolist()
        return answer, torch.cat(generated.logits).log_softmax(-1)


class Models:
    """Small checkpoints and their oracles, each created once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folders: dict[str, Path] = {}
        self.oracle = cache(Oracle)

    def folder(self, family: str, **overrides: Any) -> Path:
        """Return the folder of a random model. ``overrides`` are passed to ``make_checkpoint``."""
        name = json.dumps([family, overrides])
        if name not in self._folders:
            folder = self._root / str(len(self._folders)) / family
            self._folders[name] = make_checkpoint(folder, family, seed=11, **overrides)
        return self._folders[name]


class LocalEngine:
    """Local cluster that keeps its processes, and loaded weights while model and layout are unchanged."""

    def __init__(self, worker: str = WORKER) -> None:
        self._worker = worker
        self._cluster = LocalCluster(worker)
        self._loaded: tuple[object, ...] | None = None

    @contextmanager
    def running(
        self, folder: Path, config: DeployConfig, decode_config: DeployConfig | None = None
    ) -> Iterator[LocalCluster]:
        """Run the cluster with these settings, and separate ones for decode if given."""
        layout = (
            folder,
            config.model.dtype,
            config.kv.page_size,
            config.prefill.parallel,
            config.decode.parallel,
            config.prefill.mode,
            config.prefill.linear_shards,
            config.transfer.backend,
            config.resources.collectives,
            config.resources.moe_dispatch,
            config.hicache,
            config.transfer.verify,
        )
        if self._loaded != layout:
            self._loaded = None
            self._cluster.load(config, folder, decode_config)
            self._loaded = layout
        with self._cluster.running(config, decode_config) as running:
            yield running

    def ask(self, role: Role, method: str) -> list[Any]:
        """Return the results of a worker method, by global rank. Call this between runs."""
        return self._cluster.ask(role, method)

    def restart(self) -> None:
        """End every process. The next case starts new ones."""
        self._cluster.close()
        self._cluster, self._loaded = LocalCluster(self._worker), None

    def close(self) -> None:
        self._cluster.close()


def prompts_of(lengths: Sequence[int]) -> list[list[int]]:
    """Return random prompts, which depend on the lengths only."""
    rng = random.Random(repr(lengths))
    return [[rng.randrange(3, 250) for _ in range(length)] for length in lengths]


def asked(prompts: Sequence[Sequence[int]], num_tokens: int, num_logprobs: int | None = None) -> list[Prompt]:
    """Return greedy prompts for outputs of a given length."""
    sampling = Sampling(num_logprobs=num_logprobs)
    return [Prompt(prompt, Stopping(max_tokens=num_tokens), sampling) for prompt in prompts]
