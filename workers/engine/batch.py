"""One rank's share of one step as tensors: its tokens and positions, where K and V go, what to sample."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster.spec.strategy import Strategy
from workers.context_parallel.runs import Run
from workers.context_parallel.shard_plan import Indices, Owner, ShardPlan, make_shard_plan


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One request in a step."""

    token_ids: Sequence[int]
    """The extend tokens; at least one when the row is sampled."""
    prefix_len: int
    """Tokens already in the pages."""
    pages: Sequence[int] | NDArray[np.int64]
    """Pages of the request in order of position; enough for prefix and extend."""
    sampled: bool
    """The logits after the last token are wanted (not so in the earlier chunks of a prompt)."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A step as one rank sees it."""

    plan: ShardPlan
    cp_rank: int
    page_size: int
    token_ids: Tensor
    """``[tokens]`` int64, this rank's, in local order."""
    positions: Tensor
    """``[tokens]`` int64, position of each local token in its request."""
    slots: Tensor
    """``[gathered rows]`` int64: where K and V of each gathered row go; padding goes to the trash slot."""
    page_tables: tuple[Tensor, ...]
    """Per request, int64."""
    sampled: tuple[Owner, ...]
    """Per sampled row, in row order: the rank and local offset of its last token."""

    @property
    def runs(self) -> tuple[Run, ...]:
        """This rank's query runs, in local order."""
        return self.plan.runs[self.cp_rank]


def build_step_batch(
    rows: Sequence[BatchRow],
    strategy: Strategy,
    *,
    cp: int,
    cp_rank: int,
    page_size: int,
    trash_slot: int,
    device: torch.device,
) -> StepBatch:
    """Cut a step's rows for one CP rank; every rank of the group derives the same plan from the same rows."""
    plan = make_shard_plan(strategy, [len(row.token_ids) for row in rows], [row.prefix_len for row in rows], cp)
    local = plan.local(cp_rank)
    token_ids = _concatenate([row.token_ids for row in rows])
    positions = _concatenate([np.arange(row.prefix_len, row.prefix_len + len(row.token_ids)) for row in rows])
    tables = [np.asarray(row.pages, dtype=np.int64) for row in rows]
    slots = np.append(_slots(plan, positions, tables, page_size), trash_slot)[plan.gathered_index]

    def tensor(values: Indices) -> Tensor:
        return torch.from_numpy(values).to(device)

    return StepBatch(
        plan=plan,
        cp_rank=cp_rank,
        page_size=page_size,
        token_ids=tensor(token_ids[local]),
        positions=tensor(positions[local]),
        slots=tensor(slots),
        page_tables=tuple(tensor(table) for table in tables),
        sampled=tuple(plan.owner(plan.last_token(request)) for request, row in enumerate(rows) if row.sampled),
    )


def _slots(plan: ShardPlan, positions: Indices, tables: Sequence[Indices], page_size: int) -> Indices:
    """Slot of every token of the flattened batch."""
    for request, table in enumerate(tables):
        needed = -(-(plan.prefix_lens[request] + plan.extend_lens[request]) // page_size)
        assert len(table) >= needed, f"request {request} has {len(table)} pages and needs {needed}"
    first_entries = np.cumsum([0, *map(len, tables)])[:-1]
    entry = np.repeat(first_entries, plan.extend_lens) + positions // page_size
    return _concatenate(tables)[entry] * page_size + positions % page_size


def _concatenate(parts: Sequence[Sequence[int] | Indices]) -> Indices:
    return np.concatenate([np.asarray(part, dtype=np.int64) for part in parts]) if parts else np.empty(0, np.int64)
