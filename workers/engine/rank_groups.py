"""Groups of ranks that one rank belongs to; all ranks join them in one order."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

from cluster.spec.ids import Role
from cluster.spec.ranks import GroupName, head_copies, head_copy_groups, positions, stage_links
from cluster.spec.ranks import groups as rank_groups
from cluster.spec.worker_spec import WorkerSpec
from workers.models.interface import DecoderConfig
from workers.parallel.collectives import Communicator
from workers.parallel.groups import ReplicaStore, exchange_at_start, join_group
from workers.parallel.model_groups import ModelGroups, Pipeline

COLLECTIVE_TIMEOUT_S = 3600.0
"""Timeout of collectives once a group is up. Between CPUs a dead peer is seen at once, and this bounds only one that
is stopped but not dead, when neither the table nor the watch of its loop has ended it; over NCCL that watch ends
the waiting rank.
"""

_HEAD_COPIES = "head_copies"


@dataclass(frozen=True, slots=True)
class RankGroups:
    """Groups over which tokens and weights are divided, and links to the neighbouring stages."""

    cp: Communicator
    model: ModelGroups
    pipeline: Pipeline
    head_copies: Communicator = field(default_factory=partial(Communicator, _HEAD_COPIES))
    """Decode ranks with the same KV heads."""

    @property
    def all(self) -> tuple[Communicator, ...]:
        """Return each group once."""
        return (self.cp, *self.model.all, *self.pipeline.links, self.head_copies)

    def leave(self) -> None:
        """Leave all groups at once, since the end of one may wait for that of another; peers that wait for this rank
        fail.
        """
        with ThreadPoolExecutor(len(self.all)) as threads:
            list(threads.map(Communicator.destroy, self.all))


def join_groups(spec: WorkerSpec, store: ReplicaStore, model: DecoderConfig) -> RankGroups:
    """Meet the other ranks of a replica."""
    groups = _join_attention(spec, store)
    if model.moe is not None:
        groups = _join_experts(groups, spec, store)
    groups = _join_head_copies(groups, spec, store, [model.num_kv_heads])
    # No rank waits in a collective for one that misses a peer of another group.
    exchange_at_start(store, "joined", spec.global_rank, spec.world_size, "joined")
    return groups


def _join_attention(spec: WorkerSpec, store: ReplicaStore) -> RankGroups:
    """Join the groups that every model needs."""
    cp, tp, dp = (_join(spec, store, name) for name in (GroupName.ATTN_CP, GroupName.ATTN_TP, GroupName.ATTN_DP))
    model = ModelGroups(
        parallel=spec.pool.parallel,
        global_rank=spec.global_rank,
        tp=tp,
        dp=dp,
        moe_dispatch=spec.config.resources.moe_dispatch,
    )
    return RankGroups(cp, model, _join_stages(spec, store))


def _join_stages(spec: WorkerSpec, store: ReplicaStore) -> Pipeline:
    links = {
        sender == spec.global_rank: _join_members(spec, store, "stages", [sender, receiver])
        for sender, receiver in stage_links(spec.pool.parallel, spec.global_rank)
    }
    return Pipeline(before=links.get(False), after=links.get(True))


def _join_experts(groups: RankGroups, spec: WorkerSpec, store: ReplicaStore) -> RankGroups:
    """Join the groups of ranks that share experts."""
    model = groups.model
    shards = _join(spec, store, GroupName.MOE_SHARDS)
    block = model.tp if shards.size == 1 else _join(spec, store, GroupName.MOE_BLOCK)
    return replace(groups, model=replace(model, moe_shards=shards, moe_block=block))


def _join_head_copies(
    groups: RankGroups, spec: WorkerSpec, store: ReplicaStore, num_heads: Sequence[int]
) -> RankGroups:
    """Join the group of ranks that hold the same heads, if this replica receives KV."""
    if spec.role is not Role.DECODE or head_copies(num_heads, spec.sizes.tp) == 1:
        return groups
    members = _with(spec.global_rank, head_copy_groups(positions(spec.pool.parallel), num_heads))
    return replace(groups, head_copies=_join_members(spec, store, _HEAD_COPIES, members))


def _join(spec: WorkerSpec, store: ReplicaStore, name: GroupName) -> Communicator:
    return _join_members(spec, store, name, _with(spec.global_rank, rank_groups(spec.pool.parallel)[name]))


def _with(rank: int, groups: list[list[int]]) -> list[int]:
    return next(members for members in groups if rank in members)


def _join_members(spec: WorkerSpec, store: ReplicaStore, name: str, members: Sequence[int]) -> Communicator:
    resources = spec.config.resources
    return join_group(
        store,
        f"{name}/{members[0]}",
        members,
        spec.global_rank,
        host=spec.host,
        timeout_s=COLLECTIVE_TIMEOUT_S,
        collectives=resources.collectives,
        device=resources.device,
    )
