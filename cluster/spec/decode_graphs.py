"""Which decode steps are recorded as CUDA graphs. Pure."""

from cluster.spec.config import AttentionSetting, DecodeConfig, DeployConfig, Device, PoolConfig


def records_decode(config: DeployConfig, pool: PoolConfig) -> bool:
    """Whether workers of a pool record decode steps; of models with experts none can be recorded."""
    is_alone = pool.parallel.pp == pool.parallel.dp == 1
    by_triton = config.resources.attention is not AttentionSetting.FLASH_ATTN
    return config.resources.device is Device.CUDA and isinstance(pool, DecodeConfig) and is_alone and by_triton


def batch_sizes(most: int) -> list[int]:
    """1, 2, 4, 8, then four between each power of two and the next, or multiples of four, up to ``most``."""
    sizes = {most} | {size for size in (1, 2, 4, 8) if size < most}
    for power in (1 << bits for bits in range(3, most.bit_length())):
        sizes |= {size for size in range(power, 2 * power, max(power // 4, 4)) if size < most}
    return sorted(sizes)
