"""Choice of the experts of each token, and their weights, by router logits; the reference is in ExpertRouter."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.kernels.launch import block_of


def choose_experts(
    logits: Tensor, num_chosen: int, counted: Tensor | None, *, sum_to_one: bool
) -> tuple[Tensor, Tensor]:
    """Choose the ``num_chosen`` likeliest of ``logits [tokens, experts]``.

    Returns their numbers int32 and weights fp32, ``[tokens, k]`` each. The first of equals comes first. Tokens that are
    not ``counted``, bool ``[tokens, 1]``, get -1.
    """
    assert logits.is_contiguous(), f"strides {logits.stride()}"
    num_tokens, num_experts = logits.shape
    weights = torch.empty(num_tokens, num_chosen, dtype=torch.float32, device=logits.device)
    experts = torch.empty(num_tokens, num_chosen, dtype=torch.int32, device=logits.device)
    if num_tokens:
        _choose_kernel[(num_tokens,)](
            logits,
            counted,
            weights,
            experts,
            NUM_EXPERTS=num_experts,
            NUM_CHOSEN=num_chosen,
            SUM_TO_ONE=sum_to_one,
            BLOCK=block_of(num_experts),
            BLOCK_CHOSEN=block_of(num_chosen),
            num_warps=1,
        )
    return experts, weights


@triton.jit
def _choose_kernel(
    logits, counted, weights, experts,
    NUM_EXPERTS: tl.constexpr, NUM_CHOSEN: tl.constexpr, SUM_TO_ONE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_CHOSEN: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    each, places = tl.arange(0, BLOCK), tl.arange(0, BLOCK_CHOSEN)
    row = tl.load(logits + token * NUM_EXPERTS + each, mask=each < NUM_EXPERTS, other=-float("inf")).to(tl.float32)
    likelihoods = tl.exp(row - tl.max(row, 0))
    likelihoods = tl.where(each < NUM_EXPERTS, likelihoods / tl.sum(likelihoods, 0), -1.0)
    of_chosen, found = tl.zeros((BLOCK_CHOSEN,), tl.float32), tl.full((BLOCK_CHOSEN,), -1, tl.int32)
    is_counted = True
    if counted is not None:
        is_counted = tl.load(counted + token) != 0
    for place in range(0, NUM_CHOSEN):
        best = tl.max(likelihoods, 0)
        # If all are NaN, take the last expert, so that the number stays in bounds.
        expert = tl.minimum(tl.min(tl.where(likelihoods == best, each, BLOCK), 0), NUM_EXPERTS - 1)
        of_chosen = tl.where(places == place, best, of_chosen)
        found = tl.where((places == place) & is_counted, expert, found)
        likelihoods = tl.where(each == expert, -1.0, likelihoods)
    if SUM_TO_ONE:
        of_chosen = of_chosen / tl.sum(of_chosen, 0)
    targets = token * NUM_CHOSEN + places
    tl.store(weights + targets, of_chosen, mask=places < NUM_CHOSEN)
    tl.store(experts + targets, found, mask=places < NUM_CHOSEN)
