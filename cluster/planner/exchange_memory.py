"""Estimates of the memory of a prefill step's attention whose tokens or keys are divided among CP ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.planner.model import ModelFacts
from cluster.spec.config import DeployConfig, Device, Pool, PrefillConfig
from cluster.spec.kv import DTYPE_BYTES
from cluster.spec.memory import STAGING_SLOTS, staging_slot_bytes
from cluster.spec.ranks import head_copies
from cluster.spec.registry import KvOwnership
from cluster.spec.strategy import Passing
from workers.layers.config import Activations
from workers.models.interface import LayerCost

KEY_NUMBER_BYTES = 4
"""Bytes of a selected key's number."""
_KEPT_ROWS = 1.5
"""Memory of new keys and values that are being sent, in stored rows: a projection of both, and rotated keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpExchange:
    """Bytes per token on one rank, which computes ``num_tokens`` of the ``chunk_tokens`` tokens of a step."""

    cp: int
    num_tokens: int
    chunk_tokens: int
    longest: int
    """Maximum number of tokens of a request."""
    row: float
    """Keys and values of one layer."""
    query: float
    partial: float
    """Result of attention in fp32."""
    result: float
    """Result of attention in the model's dtype."""
    index: float
    """Queries of an indexer, and the numbers of the keys that it selects."""
    selects_keys: bool
    expands_keys: bool
    passing: Passing | None
    """None if every rank stores all keys and values."""
    in_background: bool

    @property
    def buffers(self) -> float:
        """Return the bytes of buffers, which exist between layers, too."""
        if self.passing is Passing.PASS_KV:
            return 2 * self.longest / self.cp * self.row
        is_pass_q = self.passing is Passing.PASS_Q
        return self.chunk_tokens * (self.row + is_pass_q * (self.query + self.index))

    @property
    def largest_message(self) -> float:
        if self.passing is Passing.PASS_KV:
            return self.longest / self.cp * self.row
        return self.num_tokens * (self.row if self.passing is None else max(self.row, self.query, self.partial))

    def attention_bytes(self, cost: LayerCost, bytes_of: Callable[[Activations], float]) -> float:
        """Return the bytes of a layer's attention, given those of activations."""
        plain, merging = (max(map(bytes_of, each)) for each in (cost.activations, cost.merging))
        kept = _KEPT_ROWS * self.num_tokens * self.row
        if self.passing is None:
            return max(plain, merging + kept) if self.in_background else plain
        if self.passing is Passing.PASS_KV:
            return max(plain + self.selects_keys * self.longest * self.row, merging)
        # Each rank attends with all queries, and then sends partials while it receives its own.
        returning = self.chunk_tokens * self.partial * (2 - 1 / self.cp)
        found = self.partial + self.result if self.expands_keys and not self.selects_keys else self.result
        attending = self.chunk_tokens * (self.query + self.index + found)
        sending = self.chunk_tokens * self.result + returning
        # A query that selects keys has no separate result over its own rank's rows.
        own = self.selects_keys * self.num_tokens * self.result
        return max(plain - own + max(attending, sending), merging + kept + returning)


def cp_exchanges(config: DeployConfig, pool: Pool, model: ModelFacts, num_tokens: int) -> Sequence[CpExchange | None]:
    """Return the exchange of every way in which KV may meet queries, or None alone if there is one CP rank."""
    if not isinstance(pool, PrefillConfig) or pool.parallel.cp == 1:
        return [None]
    cp, tp = pool.parallel.cp, pool.parallel.tp
    groups, shape = model.geometry.groups, model.config.cost(model.dtype)
    copies = head_copies((group.num_heads for group in groups), tp)
    is_ring = pool.ownership is KvOwnership.SHARDED
    return [
        CpExchange(
            cp=cp,
            num_tokens=num_tokens,
            chunk_tokens=pool.chunk_tokens,
            longest=config.model.longest_context(model.config.max_position_embeddings),
            row=max(group.num_heads * group.slot_bytes for group in groups) * copies / tp,
            query=shape.q_row_bytes / tp,
            partial=shape.partial_row_bytes / tp,
            result=shape.partial_row_bytes / tp * DTYPE_BYTES[model.dtype] / DTYPE_BYTES["float32"],
            index=shape.index_row_bytes + KEY_NUMBER_BYTES * (shape.top_k or 0),
            selects_keys=model.config.selects_keys,
            expands_keys=bool(shape.expand_flops),
            passing=passing,
            in_background=config.collectives_in_background,
        )
        for passing in (pool.passing.candidates if is_ring else [None])
    ]


def staging_bytes(config: DeployConfig, message: float) -> float:
    """Return the bytes of a rank's own shared memory for messages up to the given size."""
    if config.resources.device is not Device.CPU or config.collectives_in_background:
        return 0.0
    return STAGING_SLOTS * staging_slot_bytes(int(message))
