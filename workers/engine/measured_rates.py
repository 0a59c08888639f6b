"""Shape and rates by which a replica's steps are estimated."""

import msgspec

from cluster.spec.ids import Role
from cluster.spec.worker_spec import WorkerSpec
from workers.attention.interface import AttentionBackend
from workers.context_parallel.cost_model import ModelShape, Rates
from workers.context_parallel.step_time import slowest
from workers.engine.calibration import calibrate
from workers.engine.rank_groups import RankGroups
from workers.memory.page_pool import PagePool
from workers.models.decoder import DecoderModel
from workers.parallel.groups import ReplicaStore, exchange_at_start

_Measured = tuple[ModelShape, Rates]


def measured_rates(
    spec: WorkerSpec,
    store: ReplicaStore,
    model: DecoderModel,
    pool: PagePool,
    backend: AttentionBackend,
    groups: RankGroups,
    dtype: str,
) -> tuple[ModelShape, Rates]:
    """Return those of the slowest rank of all stages and DP ranks. Every rank calls this; decode chooses nothing by
    rates.
    """
    shape = model.config.cost(dtype)
    if spec.role is Role.DECODE:
        return shape, Rates()
    rates = calibrate(model, pool, backend, groups.cp, shape)
    word = msgspec.json.encode((shape, rates)).decode()
    words = exchange_at_start(store, "rates", spec.global_rank, spec.world_size, word)
    measured = [msgspec.json.decode(word, type=_Measured) for word in words]
    return slowest(measured, spec.sizes.cp, spec.config.prefill.chunk_tokens)
