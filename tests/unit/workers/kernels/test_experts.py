"""Experts computed together give the same results as one after another, with any way of counting their rows."""

import pytest
import torch

from cluster.spec.config import ParallelConfig
from tests.fakes.devices import kernels_on_cpu
from tests.unit.workers.test_feed_forward import HIDDEN, MOE, moe
from workers.expert_parallel.token_dispatcher import NO_EXPERT, RoutedTokens
from workers.layers import feed_forward
from workers.parallel.model_groups import ModelGroups


@pytest.mark.parametrize("few_choices", [0, 1000], ids=["counted by the host", "counted by the GPU"])
@pytest.mark.parametrize("num_tokens", [0, 1, 40])
def test_experts_of_a_rank(monkeypatch: pytest.MonkeyPatch, few_choices: int, num_tokens: int) -> None:
    monkeypatch.setattr(feed_forward, "FEW_CHOICES", few_choices)
    torch.manual_seed(num_tokens)
    held = moe(ModelGroups(parallel=ParallelConfig(tp=2, ep=2), global_rank=1)).experts
    assert isinstance(held, feed_forward.Experts)
    chosen = torch.rand(num_tokens, MOE.num_experts).argsort(1)[:, : MOE.top_k].to(torch.int32)
    chosen[::7] = NO_EXPERT
    routed = RoutedTokens(torch.randn(num_tokens, HIDDEN), chosen, torch.rand(num_tokens, MOE.top_k))
    with torch.inference_mode():
        expected = held(routed)
        loads = held.loads.tolist()
        kernels_on_cpu(monkeypatch)
        torch.testing.assert_close(held(routed), expected, atol=1e-5, rtol=1e-5)
    assert held.loads.tolist() == [2 * load for load in loads]
    assert sum(loads) == int((chosen.long() >= MOE.num_experts // 2).sum())
