"""Tokens of every kind of cluster equal the committed ones: greedy and sampled, computed and cached.

A change that should not alter tokens keeps ``tests/data/token_fingerprints.json`` as it is. To write it again, on
purpose, run ``python -m tests.integration.test_token_fingerprints``. It selects prompts without near ties, so that the
tokens hold on any CPU.
"""

import json
import random
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.spec.config import DeployConfig
from cluster.spec.sampling import Sampling, Stopping
from cluster.spec.tiers import Tier
from tests.fakes.local_cluster import LocalCluster, Prompt
from tests.fakes.local_engine import LocalEngine, Models, Oracle

FINGERPRINTS = Path(__file__).parents[1] / "data" / "token_fingerprints.json"
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"num_hidden_layers": 3},
    "qwen3_moe": {"num_hidden_layers": 3, "mlp_only_layers": [1]},
}
EMPTY: Mapping[str, Any] = {}
VOCABULARY = 256
NUM_TOKENS = 24
PAGE_SIZE = 16
MARGIN, BLUR = 0.01, 2e-5
"""Changes to logits, and relative changes to weights, that must not change tokens. Processors differ by far less."""
NUM_CANDIDATES = 16

Fingerprints = dict[str, dict[str, Any]]


class Request(NamedTuple):
    """Length of a prompt and the sampling parameters of its answer."""

    length: int
    sampling: dict[str, Any]


REQUESTS = {
    "greedy, 1 token": Request(1, {}),
    "greedy, 5 tokens": Request(5, {}),
    "greedy, 33 tokens": Request(33, {}),
    "greedy, 64 tokens": Request(64, {}),
    "greedy, 203 tokens": Request(203, {}),
    "penalties": Request(90, {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2}),
    "drawn": Request(47, {"temperature": 0.9, "seed": 5}),
    "drawn of few": Request(70, {"temperature": 1.3, "top_k": 20, "min_p": 0.02, "seed": 6}),
    "drawn with penalties": Request(31, {"temperature": 1.1, "top_p": 0.9, "seed": 7, "frequency_penalty": 0.3}),
}


class Case(NamedTuple):
    """One cluster."""

    name: str
    family: str
    prefill: Mapping[str, Any]
    decode: Mapping[str, Any] = EMPTY
    transfer: Mapping[str, Any] = EMPTY
    others: Mapping[str, Any] = EMPTY

    def __str__(self) -> str:
        return f"{self.family}-{self.name}"


def gather(cp: int, strategy: str, chunk_tokens: int, **axes: int) -> dict[str, Any]:
    return {"parallel": {"cp": cp, **axes}, "strategy": strategy, "chunk_tokens": chunk_tokens}


def ring(cp: int, strategy: str, passing: str, chunk_tokens: int, **axes: int) -> dict[str, Any]:
    return gather(cp, strategy, chunk_tokens, **axes) | {"mode": "ring", "passing": passing}


def side(**axes: int) -> dict[str, Any]:
    return {"parallel": axes}


RANK0, DIGEST = {"mode": "rank0"}, {"verify": "digest"}
HOST = {"hicache": {"host_gib": 0.01}}
NO_CACHE = {"kv": {"page_size": PAGE_SIZE, "memory_gib": 0.01, "prefix_cache": False}}
TCP = {"resources": {"collectives": "tcp"}}
CASES = [
    Case("one rank", "qwen3", gather(1, "none", 4096)),
    Case("one rank, small chunks", "qwen3", gather(1, "none", 7), {}, DIGEST),
    Case("cp2 zigzag", "qwen3", gather(2, "zigzag", 4096)),
    Case("cp2 interleave, rank0", "qwen3", gather(2, "interleave", 37), {}, RANK0),
    Case("cp2 contiguous", "qwen3", gather(2, "contiguous", 37)),
    Case("cp2 whole requests", "qwen3", gather(2, "whole_request", 100), {}, DIGEST),
    Case("cp2 auto", "qwen3", gather(2, "auto", 37)),
    Case("cp2 none, no prefix cache", "qwen3", gather(2, "none", 37), {}, RANK0, NO_CACHE),
    Case("cp2 host tier", "qwen3", gather(2, "zigzag", 50), {}, {}, HOST),
    Case("cp2 ring host tier", "qwen3", ring(2, "interleave", "pass_kv", 50), {}, {}, HOST),
    Case("cp2 ring passing kv", "qwen3", ring(2, "zigzag", "pass_kv", 37)),
    Case("cp2 ring passing q", "qwen3", ring(2, "interleave", "pass_q", 4096)),
    Case("cp4 zigzag", "qwen3", gather(4, "zigzag", 37)),
    Case("cp4 ring passing kv", "qwen3", ring(4, "interleave", "pass_kv", 37)),
    Case("cp4 ring passing q", "qwen3", ring(4, "zigzag", "pass_q", 4096)),
    Case("tp2 to tp1", "qwen3", gather(1, "none", 37, tp=2), side(tp=1)),
    Case("tp1 to tp2, tcp", "qwen3", gather(2, "zigzag", 37), side(tp=2), DIGEST, TCP),
    Case("cp2 tp2 ring to tp2", "qwen3", ring(2, "zigzag", "auto", 37, tp=2), side(tp=2), DIGEST),
    Case("pp2 to pp1", "qwen3", gather(1, "none", 37, pp=2), side(), DIGEST),
    Case("one rank", "qwen3_moe", gather(1, "none", 37)),
    Case("cp2 zigzag, ep2 to dp2", "qwen3_moe", gather(2, "zigzag", 37, ep=2), side(dp=2, ep=2)),
    Case("cp2 ring, moe_dp2", "qwen3_moe", ring(2, "interleave", "pass_kv", 37, moe_dp=2)),
    Case("cp2 tp2 whole requests, ep4", "qwen3_moe", gather(2, "whole_request", 100, tp=2, ep=4), side(tp=2)),
    Case("cp4 ring, ep2", "qwen3_moe", ring(4, "zigzag", "pass_q", 100, ep=2)),
]


def config_of(case: Case) -> DeployConfig:
    return DeployConfig.model_validate(
        {
            "model": {"served_name": case.family},
            "kv": {"page_size": PAGE_SIZE, "memory_gib": 0.01},
            "prefill": case.prefill,
            "decode": case.decode,
            "transfer": case.transfer,
        }
        | dict(case.others)
    )


def prompt_of(name: str, number: int) -> list[int]:
    rng = random.Random(f"{name} {number}")
    return [rng.randrange(3, VOCABULARY) for _ in range(REQUESTS[name].length)]


def generate(cluster: LocalCluster, numbers: dict[str, int]) -> dict[str, list[int]]:
    """Return the tokens of all requests, which are sent together."""
    asked = [
        Prompt(prompt_of(name, number), Stopping(max_tokens=NUM_TOKENS), Sampling(**REQUESTS[name].sampling))
        for name, number in numbers.items()
    ]
    return dict(zip(numbers, cluster.generate(asked, timeout_s=120), strict=True))


def check(case: Case, fingerprints: Fingerprints, models: Models, engine: LocalEngine) -> None:
    """Check computed tokens, then those from the prefix cache, then those from the host tier if there is one."""
    numbers = {name: entry["prompt"] for name, entry in fingerprints.items()}
    expected = {name: entry["tokens"] for name, entry in fingerprints.items()}
    with engine.running(models.folder(case.family, **MODELS[case.family]), config_of(case)) as cluster:
        assert generate(cluster, numbers) == expected
        assert generate(cluster, numbers) == expected, "from the prefix cache"
        if case.others is HOST:
            check_host_tier(cluster, numbers, expected)


def check_host_tier(cluster: LocalCluster, numbers: dict[str, int], expected: dict[str, list[int]]) -> None:
    """Ask until the host tier is used. Copies are asynchronous, so the first answers may be early."""
    longest = "greedy, 203 tokens"
    prompt = Prompt(prompt_of(longest, numbers[longest]), Stopping(max_tokens=NUM_TOKENS))
    for _ in range(50):
        cluster.flush(Tier.DEVICE)
        (answer,) = cluster.answer([prompt], timeout_s=120)
        assert answer.token_ids == expected[longest]
        if answer.cached.host:
            assert generate(cluster, numbers) == expected, "from the host tier"
            return
    raise AssertionError(f"nothing came from the host tier: {answer.cached}")


@pytest.mark.integration
@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_equal_the_committed_ones(models: Models, engine: LocalEngine, case: Case) -> None:
    fingerprints = json.loads(FINGERPRINTS.read_text(encoding="utf-8"))
    assert {family: list(entries) for family, entries in fingerprints.items()} == {
        family: list(REQUESTS) for family in MODELS
    }
    check(case, fingerprints[case.family], models, engine)


def answers_to(cluster: LocalCluster, name: str, bias: dict[int, float]) -> list[list[int]]:
    """Return the tokens of every candidate for a request."""
    sampling, stopping = Sampling(**REQUESTS[name].sampling, logit_bias=bias), Stopping(max_tokens=NUM_TOKENS)
    return cluster.generate([Prompt(prompt_of(name, number), stopping, sampling) for number in range(NUM_CANDIDATES)])


def blur(folder: Path, into: Path) -> Path:
    """Copy a checkpoint with each weight changed by more than the differences between processors."""
    shutil.copytree(folder, into)
    weights = load_file(folder / "model.safetensors")
    random_numbers = torch.Generator().manual_seed(1)
    for name, weight in weights.items():
        weights[name] = weight * (1 + BLUR * torch.randn(weight.shape, generator=random_numbers))
    save_file(weights, into / "model.safetensors", metadata={"format": "pt"})
    return into


def clear_answers(models: Models, engine: LocalEngine, family: str) -> dict[str, dict[str, Any]]:
    """Return for each request the first candidate whose tokens survive small changes to logits and to weights."""
    folder = models.folder(family, **MODELS[family])
    config = config_of(Case("one rank", family, gather(1, "none", 4096)))
    moved = [{token: random.choice((-MARGIN, MARGIN)) for token in range(VOCABULARY)} for _ in range(4)]
    with engine.running(folder, config) as cluster:
        found = {name: [answers_to(cluster, name, bias) for bias in ({}, *moved)] for name in REQUESTS}
    with engine.running(blur(folder, folder.with_suffix(".blurred")), config) as cluster:
        for name in REQUESTS:
            found[name].append(answers_to(cluster, name, {}))
    oracle = Oracle(folder, NUM_TOKENS)
    chosen = {}
    for name, (length, sampling) in REQUESTS.items():
        attempts = found[name]
        is_clear = [all(tokens == same[0] for tokens in same) for same in zip(*attempts, strict=True)]
        assert any(is_clear), f"no clear answer to {name}"
        number = is_clear.index(True)
        tokens = attempts[0][number]
        assert length == 1 or len(set(tokens)) > NUM_TOKENS // 3, f"the answer to {name} repeats itself"
        assert sampling or tokens == oracle.tokens(prompt_of(name, number)), "transformers says something else"
        chosen[name] = {"prompt": number, "tokens": tokens}
    return chosen


def write_fingerprints() -> None:
    """Write one line per request."""
    random.seed(0)
    parts = []
    with tempfile.TemporaryDirectory() as root, closing(LocalEngine()) as engine:
        models = Models(Path(root))
        for family in MODELS:
            lines = (f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in clear_answers(models, engine, family).items())
            parts.append(f"{json.dumps(family)}: {{\n" + ",\n".join(lines) + "\n}")
    FINGERPRINTS.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    write_fingerprints()
