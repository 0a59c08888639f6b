"""Greedy fp32 tokens through the API on real Ray equal transformers': a sample of the engine's matrix."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.cluster import RunningCluster, running_cluster
from tests.fakes.cluster_ends import kill_its_driver
from tests.fakes.generation import generate
from tests.fakes.local_engine import prompts_of
from tests.fakes.model_folder import TEMPLATE, write_model_folder

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

NUM_TOKENS = 32
CALLING = TEMPLATE.removeprefix("{{ bos_token }}") + "{# <tool_call> #}"
"""Template without the only token that the models lack."""
SCORED: dict[str, Any] = {"max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0, "seed": 1234}
"""Request fields with which lm-eval's local-completions scores the ends of prompts."""
LENGTHS = (1, 2, 33, 64, 130, 5, 300)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        pytest.param(
            "llama",
            (
                "prefill.strategy=zigzag",
                "prefill.mode=ring",
                "prefill.chunk_tokens=100",
                "decode.parallel.dp=2",
                "transfer.backend=mooncake",
            ),
            marks=pytest.mark.mooncake,
        ),
        pytest.param(
            "qwen3",
            ("prefill.strategy=interleave", "transfer.mode=rank0", "decode.parallel.dp=2"),
            marks=pytest.mark.full,
        ),
        pytest.param(
            "qwen3_moe",
            ("prefill.parallel.ep=2", "decode.parallel.dp=2", "decode.parallel.ep=2", "resources.cpus_per_worker=0.25"),
            marks=pytest.mark.full,
        ),
    ],
)
def test_tokens_through_the_endpoint_equal_transformers(tmp_path: Path, family: str, settings: tuple[str, ...]) -> None:
    folder = make_checkpoint(write_model_folder(tmp_path / family, template=CALLING), family, seed=5)
    prompts = prompts_of(LENGTHS)
    name = f"parity-{family.replace('_', '-')}"
    settings = (f"model.path={folder}", "kv.page_size=16", *settings)
    with running_cluster("deploy/local-cpu.yaml", name, *settings, end=kill_its_driver) as cluster:
        with ThreadPoolExecutor(len(prompts)) as clients:
            ours = list(clients.map(lambda prompt: cluster.complete(prompt, NUM_TOKENS, model=family), prompts))
        sampled = [_sampled(cluster.url, family, stream) for stream in (False, True, False)]
        ends = [(prompts[2], ours[2][:9]), (prompts[4], prompts[3]), (prompts[0], prompts[5])]
        assert_likelihoods(folder, cluster.url, family, ends)
        called = [_called(cluster.url, family, seed) for seed in range(2)]
        assert_ranks_are_shown(cluster, name)
        cluster.wait_until(cluster.is_empty, 60)
    assert len(set(called)) > 1, "other seeds give other arguments"
    assert sampled[0] == sampled[1] == sampled[2]
    assert sampled[0][0] != sampled[0][1], "the choices of a prompt differ"
    assert ours == [_oracle(folder, prompt) for prompt in prompts]


def assert_ranks_are_shown(cluster: RunningCluster, name: str) -> None:
    """Check that `baton status` shows every rank of the table, with its coordinates."""
    command = [sys.executable, "-m", "cluster.cli", "status", "--cluster", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    shown = [line.split()[:6] for line in done.stdout.splitlines() if " 127.0.0.1 " in line]
    assert sorted(shown) == sorted(
        [replica, str(record["global_rank"]), *(str(record["coords"][axis]) for axis in ("dp", "cp", "tp", "pp"))]
        for replica, entry in cluster.replicas().items()
        for record in entry["ranks"]
    )
    assert len(shown) > 2


def assert_likelihoods(folder: Path, url: str, model: str, ends: list[tuple[list[int], list[int]]]) -> None:
    """Check what lm-eval reads: the summed log-probability of each end, and whether it equals greedy decoding."""
    body = SCORED | {"model": model, "prompt": [[*prompt, *end] for prompt, end in ends]}
    scored = httpx.post(f"{url}/v1/completions", json=body, timeout=120).raise_for_status().json()
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for choice, (prompt, end) in zip(scored["choices"], ends, strict=True):
        with torch.inference_mode():
            rows = oracle(torch.tensor([[*prompt, *end]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        scores = choice["logprobs"]["token_logprobs"][len(prompt) : -1]
        assert sum(scores) == pytest.approx(float(rows.gather(1, torch.tensor(end)[:, None]).sum()), abs=1e-3)
        top = [max(likeliest.values()) for likeliest in choice["logprobs"]["top_logprobs"][len(prompt) : -1]]
        assert (scores == top) == (rows.argmax(-1).tolist() == end)


def _sampled(url: str, model: str, stream: bool) -> list[list[tuple[int, float]]]:
    """Return the tokens of two choices with their log-probabilities."""
    body = {"model": model, "prompt": prompts_of((40,))[0], "max_tokens": 20, "n": 2, "stream": stream}
    body |= {"seed": 7, "temperature": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1, "min_p": 0.01}
    body |= {"logprobs": 1, "return_token_ids": True, "ignore_eos": True}
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=120).raise_for_status()
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")] if stream else [reply.text]
    sampled: list[list[tuple[int, float]]] = [[], []]
    for choice in [choice for line in lines for choice in json.loads(line)["choices"]]:
        logprobs = [round(logprob, 2) for logprob in choice["logprobs"]["token_logprobs"]]
        sampled[choice["index"]] += zip(choice["token_ids"], logprobs, strict=True)
    assert [len(tokens) for tokens in sampled] == [20, 20]
    return sampled


def _called(url: str, model: str, seed: int) -> str:
    """Return the arguments of a forced call by a random model. The streamed arguments must be equal."""
    parameters: dict[str, object] = {
        "type": "object",
        "properties": {"size": {"type": "integer", "minimum": 0, "maximum": 999}},
        "required": ["size"],
        "additionalProperties": False,
    }
    tools: Any = [{"type": "function", "function": {"name": "set", "parameters": parameters}}]
    fields: Any = {"model": model, "messages": [{"role": "user", "content": "hi"}], "tools": tools, "seed": seed}
    fields |= {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 400, "temperature": 2.0}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        choice = client.chat.completions.create(**fields).choices[0]
        with client.chat.completions.stream(**fields) as stream:
            streamed = stream.get_final_completion().choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert choice.message.tool_calls is not None
    assert streamed.message.tool_calls is not None
    (call,), (again,) = choice.message.tool_calls, streamed.message.tool_calls
    assert call.type == again.type == "function"
    assert call.function.name == again.function.name == "set"
    arguments: str = call.function.arguments
    assert arguments == again.function.arguments
    assert set(json.loads(arguments)) == {"size"}
    return arguments


def _oracle(folder: Path, prompt: list[int]) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        tokens = generate(model, torch.tensor(prompt), NUM_TOKENS)
    answer: list[int] = tokens[len(prompt) :].tolist()
    return answer
