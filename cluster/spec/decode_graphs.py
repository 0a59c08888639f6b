"""Selection of decode steps to capture. Pure."""

from cluster.spec.checks import ModelLimits
from cluster.spec.config import AttentionSetting, DecodeConfig, DeployConfig, PoolConfig
from cluster.spec.strategy import MoeDispatch


def captures_decode(config: DeployConfig, pool: PoolConfig, model: ModelLimits) -> bool:
    """Return whether workers of a pool capture decode steps."""
    return isinstance(pool, DecodeConfig) and not why_not_captured(config, pool, model)


def why_not_captured(config: DeployConfig, pool: PoolConfig, model: ModelLimits) -> str:
    """Return why a pool of decode workers captures no steps; empty if it captures some, or for other pools."""
    resources, parallel = config.resources, pool.parallel
    if not isinstance(pool, DecodeConfig):
        return ""
    if resources.attention in (AttentionSetting.FLASH_ATTN, AttentionSetting.TORCH):
        return f"attention by {resources.attention}"
    if parallel.pp > 1:
        return "pipeline stages"
    if model.has_windows:
        return "sliding windows"
    if max(parallel.tp, parallel.dp) == 1:
        return ""
    if model.num_experts is not None and resources.moe_dispatch is MoeDispatch.ALL_TO_ALL:
        return "tokens sent to experts"  # the host needs their counts
    # A collective through the host cannot be replayed.
    return "" if resources.uses_nccl else "collectives through the host"


def batch_sizes(most: int) -> list[int]:
    """Return the captured batch sizes up to ``most``: 1, 2, 4, 8, then four sizes per power of two."""
    sizes = {most} | {size for size in (1, 2, 4, 8) if size < most}
    for power in (1 << bits for bits in range(3, most.bit_length())):
        sizes |= {size for size in range(power, 2 * power, max(power // 4, 4)) if size < most}
    return sorted(sizes)
