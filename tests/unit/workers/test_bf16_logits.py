"""Logits in bf16 on a CPU: native code is as near to fp32 as transformers in bf16."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from cluster.spec.ids import Room
from cluster.spec.kv import pages_for
from cluster.spec.sampling import Sampling
from cluster.spec.step_messages import NewRequest, ScheduledRequest, StepPlan
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.native_runner import native_runner
from workers.context_parallel.shard_plan import make_step_shape
from workers.engine.captures import CallCapture

pytestmark = pytest.mark.native

SHAPE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 64}
PROMPT_LENS, NUM_DECODED, PAGE_SIZE = (5, 40, 131, 300), 6, 16


def logits_of(folder: Path, sequences: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Return logits of the last tokens of each sequence: of the prompt's last one, and of those given to decode."""
    pages_each = pages_for(max(map(len, sequences)), PAGE_SIZE)
    runner = native_runner(monkeypatch, folder, torch.bfloat16, PAGE_SIZE, len(sequences) * pages_each)
    runner.capture_decode(1, CallCapture())
    found, logits = list[Tensor](), runner.model.logits

    def noted(hidden: Tensor) -> Tensor:
        found.append(logits(hidden).clone())
        return found[-1].clone()

    monkeypatch.setattr(runner.model, "logits", noted)
    for number, sequence in enumerate(sequences):
        room, prompt_len = Room(number), len(sequence) - NUM_DECODED
        new = NewRequest(room=room, prompt_len=prompt_len, owner_base=0, sampling=Sampling(), destination=None)
        pages, first_position = [list(range(number * pages_each, (number + 1) * pages_each))], 0
        for position, chunk in enumerate([sequence[:prompt_len], *([token] for token in sequence[prompt_len:])]):
            row = ScheduledRequest(
                room=room,
                first_position=first_position,
                token_ids=chunk,
                new_pages=[[]] if position else pages,
                samples=True,
                output_position=position,
            )
            requests, shape = [] if position else [new], make_step_shape([row])
            plan = StepPlan(step=1, shape=shape, new_requests=requests, scheduled=[row], releases=[])
            runner.begin(plan).wait()
            first_position += len(chunk)
    return torch.cat(found)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_no_further_from_fp32_than_transformers(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint(tmp_path, family, **SHAPE)
    make: Any = AutoModelForCausalLM.from_pretrained
    peer = make(folder, dtype=torch.bfloat16).eval()
    oracle = make(folder, dtype=torch.bfloat16).eval().float()
    generator = torch.Generator().manual_seed(0)
    sequences = [
        torch.randint(oracle.config.vocab_size, (length + NUM_DECODED,), generator=generator).tolist()
        for length in PROMPT_LENS
    ]
    with torch.inference_mode():
        exact, theirs = (
            torch.cat([model(torch.tensor([each])).logits[0, -NUM_DECODED - 1 :].float() for each in sequences])
            for model in (oracle, peer)
        )
        ours = logits_of(folder, sequences, monkeypatch)
    own_error, their_error = ((found - exact).square().mean().sqrt() for found in (ours, theirs))
    assert 0 < own_error <= 1.05 * their_error < 0.5 * exact.square().mean().sqrt()
