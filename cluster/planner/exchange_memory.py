"""Estimates of the memory of a prefill step's attention whose tokens or keys are divided among CP ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cluster.planner.model import ModelFacts
from cluster.spec.config import DeployConfig, Device, Pool, PrefillConfig
from cluster.spec.kv import DTYPE_BYTES
from cluster.spec.memory import STAGING_SLOTS, staging_slot_bytes
from cluster.spec.ranks import head_copies
from cluster.spec.registry import KvOwnership
from cluster.spec.strategy import Passing

KEY_NUMBER_BYTES = 4
"""Bytes of a selected key's number."""
_KEPT_ROWS = 1.5
"""Memory of new keys and values that are being sent, in stored rows: a projection of both, and rotated keys."""


class FormBytes(NamedTuple):
    """Bytes of attention in one form, on one rank."""

    plain: float
    """Activations of a step."""
    merging: float
    """Activations of a step while attention to different ranks' keys is merged."""
    tile: float
    """Keys while they are expanded."""
    query: float
    """Queries of a token."""
    partial: float
    """Result of a token in fp32."""
    result: float
    """Result of a token in the model's dtype."""
    selects_keys: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class KvExchange:
    """Bytes per token on one rank, which computes ``num_tokens`` of the ``chunk_tokens`` tokens of a step."""

    cp: int
    num_tokens: int
    chunk_tokens: int
    longest: int
    """Maximum number of tokens of a request."""
    row: float
    """Keys and values of one layer."""
    query: float
    """Queries in the widest form."""
    partial: float
    """Result of attention in fp32, in the widest form."""
    index: float
    """Queries of an indexer, and the numbers of the keys that it selects."""
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

    def attention_bytes(self, form: FormBytes) -> float:
        """Return the bytes of a layer's attention in a step."""
        if self.passing is None:
            kept = _KEPT_ROWS * self.num_tokens * self.row
            return max(form.plain, form.merging + kept) if self.in_background else form.plain
        if self.passing is Passing.PASS_KV:
            return max(form.plain + form.selects_keys * self.longest * self.row, form.merging)
        # Each rank attends with all queries, and then sends partials while it receives its own.
        returning = self.chunk_tokens * form.partial * (2 - 1 / self.cp)
        attending = self.chunk_tokens * (form.query + form.selects_keys * self.index + form.result)
        if form.tile:
            attending += self.chunk_tokens * form.partial + form.tile
        sending = self.chunk_tokens * form.result + returning
        # A query that selects keys has no separate result over its own rank's rows.
        own = self.num_tokens * (form.query + (not form.selects_keys) * form.result)
        return max(form.plain, own + max(attending, sending), form.merging + returning)


def cp_exchanges(config: DeployConfig, pool: Pool, model: ModelFacts, num_tokens: int) -> Sequence[KvExchange | None]:
    """Return one exchange for each way to bring keys and queries together, or only None if there is one CP rank."""
    if not isinstance(pool, PrefillConfig) or pool.parallel.cp == 1:
        return [None]
    cp, tp = pool.parallel.cp, pool.parallel.tp
    groups, cost = model.geometry.groups, model.config.attention.cost(model.config.hidden_size)
    copies = head_copies((group.num_heads for group in groups), tp)
    is_ring = pool.ownership is KvOwnership.SHARDED
    return [
        KvExchange(
            cp=cp,
            num_tokens=num_tokens,
            chunk_tokens=pool.chunk_tokens,
            longest=config.model.longest_context(model.config.max_position_embeddings),
            row=max(group.num_heads * group.slot_bytes for group in groups) * copies / tp,
            query=max(form.query_width for form in cost.forms) / tp * DTYPE_BYTES[model.dtype],
            partial=max(form.out_width for form in cost.forms) / tp * DTYPE_BYTES["float32"],
            index=cost.index_row_bytes + KEY_NUMBER_BYTES * (cost.top_k or 0),
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
