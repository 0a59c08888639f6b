"""The experts of each token, and their weights, are those of transformers' own routers, to the last bit."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from workers.layers.config import MoeConfig
from workers.layers.feed_forward import ExpertRouter

HIDDEN = 16


def theirs_and_ours(family: str, num_experts: int, top_k: int, *, renormalize: bool) -> tuple[Any, ExpertRouter]:
    """Two routers with the same table."""
    shape: dict[str, Any] = {"hidden_size": HIDDEN, "num_experts_per_tok": top_k}
    make: Any
    config: Any
    if family == "mixtral":
        make, config = MixtralTopKRouter, MixtralConfig(**shape, num_local_experts=num_experts)
    elif family == "qwen2_moe":
        make, config = Qwen2MoeTopKRouter, Qwen2MoeConfig(**shape, num_experts=num_experts, norm_topk_prob=renormalize)
    else:
        make, config = Qwen3MoeTopKRouter, Qwen3MoeConfig(**shape, num_experts=num_experts, norm_topk_prob=renormalize)
    moe = MoeConfig(num_experts=num_experts, top_k=top_k, intermediate_size=8, renormalize=renormalize)
    return make(config), ExpertRouter(HIDDEN, moe)


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
