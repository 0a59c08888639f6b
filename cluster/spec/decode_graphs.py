"""Which decode steps are recorded as CUDA graphs. Pure."""

from cluster.spec.config import AttentionSetting, DecodeConfig, DeployConfig, Device, PoolConfig
from cluster.spec.strategy import Collectives


def records_decode(config: DeployConfig, pool: PoolConfig) -> bool:
    """Whether workers of a pool record decode steps; of models with experts none can be recorded."""
    resources, parallel = config.resources, pool.parallel
    if resources.device is not Device.CUDA or not isinstance(pool, DecodeConfig):
        return False
    is_alone = parallel.pp == parallel.dp == 1
    # What goes through the host in the middle of a step cannot be replayed.
    on_gpus = parallel.tp == 1 or resources.collectives is Collectives.AUTO
    return is_alone and on_gpus and resources.attention is not AttentionSetting.FLASH_ATTN


def batch_sizes(most: int) -> list[int]:
    """1, 2, 4, 8, then four between each power of two and the next, or multiples of four, up to ``most``."""
    sizes = {most} | {size for size in (1, 2, 4, 8) if size < most}
    for power in (1 << bits for bits in range(3, most.bit_length())):
        sizes |= {size for size in range(power, 2 * power, max(power // 4, 4)) if size < most}
    return sorted(sizes)
