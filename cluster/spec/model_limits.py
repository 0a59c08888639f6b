"""Parallel sizes that a model allows. Pure arithmetic."""

from dataclasses import dataclass

from cluster.spec.config import ParallelConfig, PrefillConfig
from cluster.spec.errors import Problem
from cluster.spec.registry import KvOwnership


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """Sizes of a model that ranks must be able to share."""

    num_heads: int
    """Query heads."""
    num_kv_heads: int
    num_layers: int
    num_experts: int | None
    """Experts of a layer; None in dense models."""
    has_windows: bool = False
    """True if tokens of some layer see only the latest ones."""


def layout_problems(parallel: ParallelConfig, path: str, model: ModelLimits) -> list[Problem]:
    """Return axes that are legal in themselves but not for this model; ``path`` is their place in the file."""
    tp, pp = parallel.tp, parallel.pp
    problems = []
    if model.num_heads % tp:
        message = f"got {tp}; allowed: a divisor of the model's {model.num_heads} heads"
        problems.append(Problem(f"{path}.tp", message))
    elif model.num_kv_heads % tp and tp % model.num_kv_heads:
        message = f"got {tp}; allowed: a divisor or a multiple of the model's {model.num_kv_heads} KV heads"
        problems.append(Problem(f"{path}.tp", message))
    problems += _expert_problems(parallel, path, model.num_experts)
    if pp > model.num_layers:
        problems.append(Problem(f"{path}.pp", f"got {pp}; allowed: at most the model's {model.num_layers} layers"))
    return problems


def ring_problems(prefill: PrefillConfig, model: ModelLimits) -> list[Problem]:
    """Return the problem of a ring with sliding windows, each of which needs adjacent pages on one rank."""
    if prefill.ownership is KvOwnership.REPLICATED or not model.has_windows:
        return []
    message = (
        f"got {prefill.mode} with cp = {prefill.parallel.cp}; allowed: gather, since the model has sliding windows"
    )
    return [Problem("prefill.mode", message)]


def _expert_problems(parallel: ParallelConfig, path: str, num_experts: int | None) -> list[Problem]:
    if num_experts is None:
        return [
            Problem(f"{path}.{axis}", f"got {size}; allowed: 1, since the model has no experts")
            for axis, size in (("ep", parallel.ep), ("moe_dp", parallel.moe_dp))
            if size > 1
        ]
    if num_experts % parallel.ep:
        return [Problem(f"{path}.ep", f"got {parallel.ep}; allowed: a divisor of the model's {num_experts} experts")]
    return []
