"""Steps on a GPU of twins compared with the CPU. The host waits only for tokens, and all tensors are on the GPU."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from cluster.spec.ids import Room
from cluster.spec.sampling import Sampled, Sampling
from cluster.spec.step_messages import NewRequest, ScheduledRequest, StepPlan
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.gpu_twin import twin_gpu
from workers.attention.interface import AttentionBackend
from workers.attention.torch_backend import TorchAttention
from workers.attention.triton.backend import TritonAttention
from workers.context_parallel.shard_plan import make_step_shape
from workers.device import CPU, Device
from workers.engine.begun_step import BegunStep
from workers.engine.decode_graphs import REPLAYED
from workers.engine.rank_groups import RankGroups
from workers.engine.runner import ModelRunner
from workers.engine.weights import load_model
from workers.memory.page_pool import PagePool

PROMPTS = [list(range(3, 27)), list(range(100, 111)), [200, 9, 77]]
PAGES = [[7, 2, 9, 4], [0, 11, 5], [3, 10]]
SAMPLINGS = [
    Sampling(num_logprobs=3),
    Sampling(temperature=0.8, top_p=0.9, seed=3, num_logprobs=3, min_tokens=9, ending_ids=frozenset({9})),
    Sampling(temperature=0.7, top_k=9, repetition_penalty=1.2, logit_bias={3: 1.0}, num_logprobs=3),
]
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_hidden_layers": 1, "num_experts": 4},
    "deepseek_v3": {"num_hidden_layers": 2},
    "glm_moe_dsa": {"num_hidden_layers": 2, "indexer_types": ["full", "shared"], "max_position_embeddings": 64},
}


class Requests:
    """Requests of one runner, and the tokens that each step has sampled."""

    def __init__(self, device: Device, backend: AttentionBackend, folder: Path) -> None:
        model = load_model(folder, device=device)
        pool = PagePool.of_one_rank(model.config.kv_geometry("model", "float32", 8), 12, device.torch_device)
        self.runner = ModelRunner(model, pool, backend, RankGroups())
        self.runner.run_dummy(1)  # the host waits in the first step
        self.sampled: list[dict[Room, Sampled]] = []
        self._lens = Counter[int]()

    def run(self) -> None:
        """Run prompts in chunks, mixed steps, and decode steps of fewer and fewer requests, the last one ahead."""
        first, second, third = PROMPTS
        self._step({0: first[:16]})
        self._step({0: first[16:], 1: second})
        self._step({0: self._last(0), 1: self._last(1), 2: third})
        for numbers in ((0, 1, 2), (2, 0)):
            self._step({number: self._last(number) for number in numbers})
        begun = [self._begin({1: self._last(1)}), self._begin({1: [0]}, follows=True)]
        self.sampled += [step.wait() for step in begun]

    def _step(self, parts: Mapping[int, Sequence[int]]) -> None:
        self.sampled.append(self._begin(parts).wait())

    def _last(self, number: int) -> list[int]:
        return [next(step[Room(number)].token_id for step in reversed(self.sampled) if number in step)]

    def _begin(self, parts: Mapping[int, Sequence[int]], *, follows: bool = False) -> BegunStep:
        new, scheduled = [], []
        for number, token_ids in parts.items():
            room, prompt_len, begin = Room(number), len(PROMPTS[number]), self._lens[number]
            end = self._lens[number] = begin + len(token_ids)
            if not begin:
                sampling = SAMPLINGS[number]
                new.append(
                    NewRequest(room=room, prompt_len=prompt_len, owner_base=0, sampling=sampling, destination=None)
                )
            scheduled.append(
                ScheduledRequest(
                    room=room,
                    first_position=begin,
                    token_ids=list(token_ids),
                    new_pages=[] if begin else [PAGES[number]],
                    samples=end >= prompt_len,
                    output_position=max(end - prompt_len, 0),
                    input_from_previous_step=follows,
                )
            )
        shape = make_step_shape(scheduled)
        return self.runner.begin(StepPlan(step=0, shape=shape, new_requests=new, scheduled=scheduled, releases=[]))


def _likelihoods(token: Sampled) -> list[float]:
    assert token.logprobs is not None
    return token.logprobs.top_logprobs


@pytest.mark.parametrize(("family", "is_captured"), [*((family, True) for family in SHAPES), ("glm_moe_dsa", False)])
def test_steps_on_a_gpu(tmp_path: Path, family: str, *, is_captured: bool) -> None:
    folder = make_checkpoint(tmp_path, family, **SHAPES[family])
    on_cpu = Requests(CPU, TorchAttention(), folder)
    on_cpu.run()
    with twin_gpu() as gpu:
        on_gpu = Requests(gpu, TritonAttention(), folder)
        if is_captured:
            on_gpu.runner.capture_decode(3, gpu.capture)
        gpu.may_wait = False
        on_gpu.run()
    assert gpu.num_waits == len(on_gpu.sampled)
    assert on_gpu.runner.graph_steps == ({"prompt tokens": 3, REPLAYED: 4} if is_captured else {})
    for found, expected in zip(on_gpu.sampled, on_cpu.sampled, strict=True):
        assert found.keys() == expected.keys()
        for room, token in found.items():
            assert token.token_id == expected[room].token_id
            assert _likelihoods(token) == pytest.approx(_likelihoods(expected[room]), abs=1e-3)
