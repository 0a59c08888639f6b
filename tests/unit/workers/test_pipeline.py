"""A pipeline of stages: hidden states pass through, each stage reads its weights, and stages rarely wait."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.spec.config import ParallelConfig
from cluster.spec.sampling import Sampled
from cluster.spec.strategy import StrategySetting
from tests.fakes.checkpoints import FAMILIES, make_checkpoint
from tests.fakes.dense_attention import DenseAttention
from tests.fakes.pipeline_replay import bubble, chunk_lens, least_bubble
from tests.fakes.prefill_steps import PAGE_SIZE as PAGE_SIZE_OF_STEPS
from tests.fakes.prefill_steps import PrefillSteps
from tests.fakes.sequences import sequence_of
from tests.fakes.thread_group import on_thread_ranks
from workers.cache.page_allocator import PageAllocator
from workers.context_parallel.chunk_sizes import even_chunk
from workers.context_parallel.cost_model import ModelShape, Rates
from workers.context_parallel.strategy_chooser import StrategyChooser
from workers.engine.weights import load_model
from workers.parallel.communicator import Communicator
from workers.parallel.model_groups import ModelGroups, Pipeline
from workers.scheduler.sequence import TokenSequence
from workers.scheduler.step_scheduler import StepLimits, StepScheduler

TOKENS = torch.arange(3, 40)
PAGE_SIZE = 64
SHAPE = ModelShape(
    num_layers=16,
    linear_flops=2 * 10**8,
    kv_flops=10**7,
    attention_flops=16384,
    partial_row_bytes=16384,
    kv_row_bytes=4096,
    q_row_bytes=8192,
)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_stages_one_after_another_are_the_whole_model(tmp_path: Path, family: str, tied: bool) -> None:
    shape: dict[str, Any] = {"indexer_types": ["full", "full", "shared"]} if family == "glm_moe_dsa" else {}
    folder = make_checkpoint(tmp_path, family, num_hidden_layers=3, tie_word_embeddings=tied, **shape)
    stages = [
        load_model(folder, groups=ModelGroups(parallel=ParallelConfig(pp=2), global_rank=rank)) for rank in (0, 1)
    ]
    assert [list(stage.layers) for stage in stages] == [["0"], ["1", "2"]]
    whole, hidden = load_model(folder), None
    with torch.inference_mode():
        for stage in stages:
            hidden = stage(TOKENS, TOKENS, DenseAttention(), hidden)
        assert hidden is not None
        assert torch.equal(stages[-1].logits(hidden), whole.logits(whole(TOKENS, TOKENS, DenseAttention())))
    held = [stage.weights().keys() for stage in stages]
    assert held[0] | held[1] == whole.weights().keys()
    assert held[0] & held[1] == ({"model.embed_tokens.weight"} if tied else set())


def test_hidden_states_reach_the_next_stage_in_order() -> None:
    def run(link: Communicator) -> list[torch.Tensor]:
        sent = [torch.full((length, 4), float(length)) for length in (3, 0, 5)]
        if link.rank == 0:
            for hidden in sent:
                Pipeline(after=link).send(hidden)
            return sent
        return [Pipeline(before=link).receive(torch.empty_like(hidden)) for hidden in sent]

    for sent, received in zip(*on_thread_ranks(2, run), strict=True):
        assert torch.equal(sent, received)


@pytest.mark.parametrize(("num_stages", "num_chunks"), [(2, 8), (4, 16), (3, 6)])
def test_chunks_of_a_long_prompt_leave_hardly_more_bubble_than_equal_ones(num_stages: int, num_chunks: int) -> None:
    depth, rates = num_stages + 1, Rates()
    chooser = StrategyChooser(setting=StrategySetting.AUTO, cp=1, shape=SHAPE, rates=rates)
    chunk = even_chunk(SHAPE, rates, 1, 2048, num_stages)
    prompt_len = sum(chunk_lens(chunk, num_chunks))
    limits = StepLimits(PAGE_SIZE, 2048, 8, depth=depth)
    steps = StepScheduler(PageAllocator(prompt_len // PAGE_SIZE + 2), limits, chooser, chunk)
    steps.add(_sequence(prompt_len))
    times_s = []
    while (plan := steps.next_plan()) is not None:
        assert plan.estimate_s is not None
        times_s.append([plan.estimate_s] * num_stages)
        steps.commit(plan, {request.room: Sampled(token_id=1) for request in plan.scheduled if request.samples})
        if plan.scheduled[0].samples:
            break
    assert len(times_s) == num_chunks
    assert max(times_s)[0] < 1.1 * min(times_s[:-1])[0], "chunks of equal time, but for what is left at the end"
    assert abs(bubble(times_s, depth) - least_bubble(num_stages, num_chunks)) < 0.03


class ChunkedPrompts:
    """Prompts in the chunks of a pipeline's scheduler."""

    def __init__(self, chunk_tokens: int, attention_flops: int, fixed_s: float) -> None:
        self._shape, self._rates = replace(SHAPE, attention_flops=attention_flops), Rates(step_s=fixed_s)
        self.chunk = even_chunk(self._shape, self._rates, 1, chunk_tokens, pp=2)
        self.steps = PrefillSteps(chunk_tokens=chunk_tokens, prefix_cache=True, chunk=self.chunk)
        self.full_s = self.work_s(0, chunk_tokens)

    def work_s(self, prefix_len: int, count: int) -> float:
        """Return the work for tokens after a prefix, on all layers."""
        token_s = self._shape.linear_flops / self._rates.linear_flops_per_s + self._rates.row_s
        pairs = count * prefix_len + count * count / 2
        pair_s = self._shape.attention_flops / self._rates.attention_flops_per_s
        return self._shape.num_layers * (count * token_s + pairs * pair_s)

    def run(self) -> list[list[tuple[int, int]]]:
        """Return the prefix and token count of each scheduled request, step by step, until nothing is left."""
        steps = []
        while (plan := self.steps.run_step()) is not None:
            steps.append([(request.first_position, len(request.token_ids)) for request in plan.scheduled])
        return steps


cut_prompts = st.builds(
    ChunkedPrompts,
    chunk_tokens=st.integers(256, 1024),
    attention_flops=st.integers(1, 60_000),
    fixed_s=st.floats(1e-4, 10.0),
)


@settings(max_examples=30)
@given(prompts=cut_prompts, prefix_len=st.integers(1, 3000), prompt_len=st.integers(1, 4000))
def test_all_chunks_of_a_prompt_take_equally_long_whatever_its_prefix_and_fixed_costs(
    prompts: ChunkedPrompts, prefix_len: int, prompt_len: int
) -> None:
    prefix = list(range(prefix_len))
    prompts.steps.add(prefix)
    prompts.run()
    prompts.steps.add([*prefix, *[-1] * prompt_len])
    rows = [row for step in prompts.run() for row in step]
    cached_len = prefix_len // PAGE_SIZE_OF_STEPS * PAGE_SIZE_OF_STEPS
    assert rows[0][0] == cached_len
    assert sum(count for _, count in rows) == prefix_len + prompt_len - cached_len
    for row in rows[:-1]:
        assert prompts.work_s(*row) == pytest.approx(prompts.full_s, rel=0.02)
    assert prompts.work_s(*rows[-1]) <= prompts.full_s * 1.02


@settings(max_examples=30)
@given(prompts=cut_prompts, lengths=st.lists(st.integers(1, 3000), min_size=2, max_size=5))
def test_steps_that_prompts_share_are_as_full(prompts: ChunkedPrompts, lengths: list[int]) -> None:
    for length in lengths:
        prompts.steps.add(length)
    *steps, _ = prompts.run()
    for rows in steps:
        shares = [count / prompts.chunk(prefix_len) for prefix_len, count in rows]
        assert sum(shares) <= 1 + 1e-9
        # The rest of a step is less than any request's next token.
        assert sum(shares) >= 1 - 1 / min(prompts.chunk(prefix_len) for prefix_len, _ in rows) - 1e-9


def _sequence(prompt_len: int) -> TokenSequence:
    return sequence_of(1, [1] * prompt_len)
