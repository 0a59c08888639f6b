"""Memory and traffic of the query and output projections that CP ranks share (`prefill.shard_linear`)."""

from dataclasses import dataclass, replace

from cluster.planner.model import ModelFacts, prefill_shape
from cluster.planner.worker_memory import num_projections
from cluster.spec.config import DeployConfig, Device
from cluster.spec.kv import DTYPE_BYTES
from cluster.spec.ranks import stage_layers
from cluster.spec.strategy import ShardLinear
from workers.context_parallel.cost_model import ModelShape, Rates
from workers.context_parallel.shard_plan import dummy_request
from workers.context_parallel.strategy_chooser import StrategyChooser

GPU_RATES = Rates(
    step_s=2e-3,
    linear_flops_per_s=4e14,
    attention_flops_per_s=3e14,
    run_s=1e-5,
    row_s=1e-9,
    merge_row_s=1e-8,
    exchange_s=2e-5,
    exchange_bytes_per_s=2e11,
)
"""Rates of GPUs like the H200 that are linked by NVLink. Allowances of about half the peak rates, not measurements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectionsPlan:
    """Query and output projections on the prefill worker with the most, and their traffic at assumed rates."""

    way: ShardLinear
    held_bytes: int
    """Bytes of a worker's projections, and of its buffers for those of other workers."""
    whole_bytes: int
    """Bytes of projections that the worker would hold alone."""
    step_bytes: int
    """Bytes that a worker receives in every step, or sends if it holds the layer."""
    bytes_per_s: float
    transfer_s: float
    """Time of the transfers of a step."""
    chunk_tokens: int
    chunk_s: float
    """Time of a step with ``chunk_tokens`` of a new prompt, apart from the transfers."""
    exposed_s: float
    """Part of ``transfer_s`` by which such a step takes longer than ``chunk_s``."""


def projections_plan(config: DeployConfig, model: ModelFacts) -> ProjectionsPlan | None:
    """Return the plan of the fullest stage; None if every worker holds all projections."""
    prefill, shards = config.prefill, config.prefill.linear_shards
    if shards is None:
        return None
    layers = stage_layers(model.config.num_layers, prefill.parallel.pp, prefill.parallel.pp - 1)
    shape = prefill_shape(config, model, layers)
    rates = GPU_RATES if config.resources.device is Device.CUDA else Rates()
    rates = replace(rates, hidden_share=float(config.collectives_in_background))

    def chunk_s(work: ModelShape) -> float:
        choose = StrategyChooser.of(prefill, work, rates)
        return choose([dummy_request(prefill.chunk_tokens)]).estimate_s or 0.0

    alone_s = chunk_s(replace(shape, weight_bytes=0))
    held, whole = (num_projections(each, prefill, model, len(layers)) for each in (shards, None))
    step_bytes = len(layers) * shape.weight_bytes
    return ProjectionsPlan(
        way=shards.way,
        held_bytes=held * DTYPE_BYTES[model.dtype],
        whole_bytes=whole * DTYPE_BYTES[model.dtype],
        step_bytes=step_bytes,
        bytes_per_s=rates.exchange_bytes_per_s,
        transfer_s=len(layers) * rates.exchange_s + step_bytes / rates.exchange_bytes_per_s,
        chunk_tokens=prefill.chunk_tokens,
        chunk_s=alone_s,
        exposed_s=max(0.0, chunk_s(shape) - alone_s),
    )
