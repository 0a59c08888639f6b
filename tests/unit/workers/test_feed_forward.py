"""Feed-forward layers in every layout: each rank gets the same result as one rank that computes everything."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from cluster.spec.config import ParallelConfig
from cluster.spec.ranks import axis_problems
from cluster.spec.strategy import MoeDispatch
from tests.fakes.thread_layout import on_thread_layout
from workers.expert_parallel.dispatch_cost import BlockShape, cheaper_dispatch
from workers.expert_parallel.token_dispatcher import RoutedTokens
from workers.layers.config import MoeConfig
from workers.layers.feed_forward import ExpertRouter, GatedMLP, MoeBlock
from workers.parallel.model_groups import ModelGroups

ROUTER_HIDDEN = 16


def theirs_and_ours(family: str, num_experts: int, top_k: int, *, renormalize: bool) -> tuple[Any, ExpertRouter]:
    """Return two routers with the same weights."""
    shape: dict[str, Any] = {"hidden_size": ROUTER_HIDDEN, "num_experts_per_tok": top_k}
    make: Any
    config: Any
    if family == "mixtral":
        make, config = MixtralTopKRouter, MixtralConfig(**shape, num_local_experts=num_experts)
    elif family == "qwen2_moe":
        make, config = Qwen2MoeTopKRouter, Qwen2MoeConfig(**shape, num_experts=num_experts, norm_topk_prob=renormalize)
    else:
        make, config = Qwen3MoeTopKRouter, Qwen3MoeConfig(**shape, num_experts=num_experts, norm_topk_prob=renormalize)
    moe = MoeConfig(num_experts=num_experts, top_k=top_k, intermediate_size=8, renormalize=renormalize)
    return make(config), ExpertRouter(ROUTER_HIDDEN, moe)


@pytest.mark.parametrize(
    ("family", "renormalize"), [("mixtral", True), ("qwen2_moe", False), ("qwen3_moe", True), ("qwen3_moe", False)]
)
@given(
    num_experts=st.integers(1, 9), data=st.data(), num_tokens=st.integers(0, 20), seed=st.integers(0, 2**32),
    has_ties=st.booleans(),
)  # fmt: skip
def test_choices_and_weights_are_transformers(
    family: str, renormalize: bool, num_experts: int, data: st.DataObject, num_tokens: int, seed: int, has_ties: bool
) -> None:
    top_k = data.draw(st.integers(1, num_experts))
    theirs, ours = theirs_and_ours(family, num_experts, top_k, renormalize=renormalize)
    generator = torch.Generator().manual_seed(seed)
    table, hidden = (
        torch.randn(num_experts, ROUTER_HIDDEN, generator=generator),
        torch.randn(num_tokens, ROUTER_HIDDEN, generator=generator),
    )
    if has_ties:
        table[num_experts // 2 :] = table[0]
    with torch.no_grad():
        theirs.weight.copy_(table)
        ours.get_parameter("weight").copy_(table)
        _, weights, experts = theirs(hidden)
        routed = ours(hidden)
    assert torch.equal(routed.experts.long(), experts)
    assert torch.equal(routed.weights, weights)


Block = TypeVar("Block", bound=nn.Module)

HIDDEN, WIDTH, NUM_EXPERTS = 6, 9, 4
MOE = MoeConfig(
    num_experts=NUM_EXPERTS,
    top_k=2,
    intermediate_size=WIDTH,
    renormalize=True,
    shared_size=5,
)
LAYOUTS = [
    layout
    for dp, cp, tp, ep, copies in [
        (1, 1, 1, 1, False),
        (1, 1, 2, 1, False),
        (1, 1, 4, 2, False),
        (1, 2, 1, 1, False),
        (1, 2, 1, 2, False),
        (1, 2, 2, 2, False),
        (1, 2, 2, 4, False),
        (1, 2, 2, 2, True),
        (2, 1, 1, 1, False),
        (2, 1, 2, 4, False),
        (2, 2, 1, 2, False),
        (2, 2, 1, 2, True),
        (2, 2, 2, 4, True),
    ]
    if not axis_problems(layout := ParallelConfig(dp=dp, cp=cp, tp=tp, ep=ep, moe_dp=cp if copies else 1), "")
]


class Step(NamedTuple):
    """Tokens of each attention shard, or the tokens that all shards have."""

    tokens: Sequence[Tensor]
    is_same: bool

    @property
    def lens(self) -> tuple[int, ...] | None:
        return None if self.is_same else tuple(map(len, self.tokens))


def step_of(parallel: ParallelConfig, lens: Sequence[int]) -> Step:
    """Return a step with the given lengths in rotation. Without lengths, all shards have the same tokens."""
    num_shards = parallel.dp * parallel.cp
    generator = torch.Generator().manual_seed(num_shards)
    if not lens:
        return Step([torch.randn(7, HIDDEN, generator=generator)] * num_shards, is_same=True)
    return Step(
        [torch.randn(lens[shard % len(lens)], HIDDEN, generator=generator) for shard in range(num_shards)], False
    )


def filled(block: Block) -> Block:
    """Fill in weights as from a checkpoint: generated in full, by name, and sharded for this rank."""
    parts = {
        f"{path}.{name}": part
        for path, module in block.named_modules()
        if hasattr(module, "weights")
        for name, part in module.weights()
    }
    for name, part in parts.items():
        whole = torch.randn(part.whole, generator=torch.Generator().manual_seed(sum(name.encode())))
        part.cleared().copy_(whole[part.index])
    return block


def moe(groups: ModelGroups) -> MoeBlock:
    return filled(MoeBlock(HIDDEN, MOE, groups))


def dense(groups: ModelGroups) -> GatedMLP:
    return filled(GatedMLP(HIDDEN, WIDTH, groups, bias=True))


def check(
    make: Callable[[ModelGroups], Block], parallel: ParallelConfig, step: Step, dispatch: MoeDispatch
) -> list[Block]:
    """Check that every rank's block gives the same result as a single rank. Return the blocks."""

    def run(groups: ModelGroups) -> tuple[Block, Tensor]:
        block, shard = make(groups), groups.global_rank // parallel.tp
        return block, block(step.tokens[shard], step.lens)

    with torch.inference_mode():
        answers = on_thread_layout(parallel, run, dispatch)
        alone = make(ModelGroups())
        for rank, (_, answer) in enumerate(answers):
            expected = alone(step.tokens[rank // parallel.tp], None)
            torch.testing.assert_close(answer, expected, atol=1e-5, rtol=1e-5)
    return [block for block, _ in answers]


@pytest.fixture(params=[(3, 5, 0, 2), (4,), (0, 1), ()], ids=str)
def lens(request: pytest.FixtureRequest) -> Any:
    """Return unequal and equal lengths, with some idle shards, or None for the same tokens everywhere."""
    return request.param


@pytest.mark.parametrize("dispatch", MoeDispatch)
@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
def test_experts_answer_as_one_rank_does(parallel: ParallelConfig, dispatch: MoeDispatch, lens: Any) -> None:
    if lens or parallel.dp == 1:
        check(moe, parallel, step_of(parallel, lens), dispatch)


@pytest.mark.parametrize(
    "parallel", [ParallelConfig(tp=2), ParallelConfig(dp=3), ParallelConfig(dp=2, cp=2, tp=2)], ids=str
)
def test_a_dense_mlp_is_divided_over_dp_and_tp(parallel: ParallelConfig, lens: Any) -> None:
    if lens or parallel.dp == 1:
        blocks = check(dense, parallel, step_of(parallel, lens), MoeDispatch.AUTO)
        width = -(-WIDTH // (parallel.dp * parallel.tp))
        assert {block.down.weight.shape[1] for block in blocks} == {width}


@pytest.mark.parametrize("num_tokens", [0, 3])
@pytest.mark.parametrize("top_k", [1, 2])
def test_tokens_are_packed_and_unpacked(num_tokens: int, top_k: int) -> None:
    scores = torch.rand(num_tokens, top_k)
    experts = torch.arange(num_tokens * top_k, dtype=torch.int32).view(num_tokens, top_k)
    # A product of one column without rows has stride 0, which torch does not view as bytes.
    tokens = RoutedTokens(torch.rand(num_tokens, HIDDEN, dtype=torch.bfloat16), experts, scores * 2.5)
    for part, found in zip(tokens, tokens.unpack(tokens.packed()), strict=True):
        assert torch.equal(part, found)


@pytest.mark.parametrize("dispatch", [MoeDispatch.GATHER, MoeDispatch.ALL_TO_ALL])
def test_loads_count_every_choice_once_for_each_copy(dispatch: MoeDispatch) -> None:
    parallel, lens = ParallelConfig(cp=2, tp=2, ep=4), (3, 5)
    blocks = check(moe, parallel, step_of(parallel, lens), dispatch)
    assert sum(int(block.experts.loads.sum()) for block in blocks) == sum(lens) * MOE.top_k


@given(
    st.builds(
        BlockShape,
        shards=st.integers(1, 8),
        tp=st.integers(1, 4),
        ep=st.integers(1, 8),
        moe_tp=st.just(1),
        top_k=st.integers(1, 8),
    )
)
@settings(max_examples=50)
def test_a_choice_is_made_for_any_lengths(shape: BlockShape) -> None:
    for lens in (None, [5] * shape.shards, [0] * shape.shards):
        assert cheaper_dispatch(shape, lens) is not MoeDispatch.AUTO


def test_wide_experts_are_sent_and_narrow_ones_gathered() -> None:
    wide = BlockShape(shards=8, tp=1, ep=8, moe_tp=1, top_k=2)
    narrow = BlockShape(shards=1, tp=4, ep=4, moe_tp=1, top_k=4)
    assert cheaper_dispatch(wide, [100] * 8) is MoeDispatch.ALL_TO_ALL
    assert cheaper_dispatch(narrow, [100]) is MoeDispatch.GATHER
