"""The experts of each token, and their weights, are those of transformers' own routers, to the last bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from workers.expert_parallel.seats import in_order
from workers.layers.expert_router import ExpertRouter
from workers.models.config import ExpertNames, MoeConfig

HIDDEN = 16


def theirs_and_ours(family: str, num_experts: int, num_chosen: int, *, sum_to_one: bool) -> tuple[Any, ExpertRouter]:
    """Two routers with the same table."""
    make: Callable[[Any], Any]
    config: MixtralConfig | Qwen3MoeConfig
    if family == "mixtral":
        make = MixtralTopKRouter
        config = MixtralConfig(hidden_size=HIDDEN, num_experts_per_tok=num_chosen, num_local_experts=num_experts)
    else:
        make = Qwen3MoeTopKRouter
        config = Qwen3MoeConfig(
            hidden_size=HIDDEN,
            num_experts_per_tok=num_chosen,
            num_experts=num_experts,
            norm_topk_prob=sum_to_one,
        )
    theirs = make(config)
    moe = MoeConfig(
        num_experts=num_experts,
        num_chosen=num_chosen,
        intermediate_size=8,
        sum_to_one=sum_to_one,
        dense_layers=frozenset(),
        names=ExpertNames("mlp", "gate", "up", "down"),
    )
    return theirs, ExpertRouter(HIDDEN, moe, in_order(num_experts, 1))


@pytest.mark.parametrize(("family", "sum_to_one"), [("mixtral", True), ("qwen3_moe", True), ("qwen3_moe", False)])
@given(
    num_experts=st.integers(1, 9), data=st.data(), num_tokens=st.integers(0, 20), seed=st.integers(0, 2**32),
    has_ties=st.booleans(),
)  # fmt: skip
def test_choices_and_weights_are_transformers(
    family: str, sum_to_one: bool, num_experts: int, data: st.DataObject, num_tokens: int, seed: int, has_ties: bool
) -> None:
    num_chosen = data.draw(st.integers(1, num_experts))
    theirs, ours = theirs_and_ours(family, num_experts, num_chosen, sum_to_one=sum_to_one)
    generator = torch.Generator().manual_seed(seed)
    table, hidden = (
        torch.randn(num_experts, HIDDEN, generator=generator),
        torch.randn(num_tokens, HIDDEN, generator=generator),
    )
    if has_ties:
        table[num_experts // 2 :] = table[0]
    with torch.no_grad():
        theirs.weight.copy_(table)
        ours.weight.copy_(table)
        _, weights, experts = theirs(hidden)
        routed = ours(hidden)
    assert torch.equal(routed.experts.long(), experts)
    assert torch.equal(routed.weights, weights)
