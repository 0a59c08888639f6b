"""Tokens of a rank's experts, expert by expert."""

from torch import Tensor


def order_by_expert(experts: Tensor, first: int, num_local: int) -> tuple[Tensor, list[int]]:
    """Sort the choices of local experts, ``first`` and the next ``num_local - 1``, by expert and then by token.

    Returns their indices in ``experts [tokens, k]``, flattened, and how many each expert has. On a GPU the host waits
    for the counts.
    """
    local = experts.flatten().long() - first
    local[(local < 0) | (local >= num_local)] = num_local
    counts = local.bincount(minlength=num_local + 1).tolist()[:num_local]
    return local.argsort(stable=True)[: sum(counts)], counts
