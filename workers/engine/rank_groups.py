"""Communication groups to which one rank belongs."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch

from cluster.spec.ids import Role
from cluster.spec.ranks import GroupName, head_copies, head_copy_groups, positions, stage_links
from cluster.spec.ranks import groups as rank_groups
from cluster.spec.worker_spec import WorkerSpec
from workers.device import Device
from workers.models.interface import DecoderConfig
from workers.parallel.communicator import Communicator
from workers.parallel.groups import join_group
from workers.parallel.model_groups import ModelGroups, Pipeline
from workers.parallel.store import ReplicaStore, exchange_at_start

COLLECTIVE_TIMEOUT_S = 3600.0
"""Timeout of collectives once a group is ready. On a CPU, a dead peer is noticed immediately, so the timeout only
bounds the wait for a suspended peer. With NCCL, the waiting rank's watchdog ends its process.
"""

_HEAD_COPIES, _PROJECTIONS = "head_copies", "projections"


@dataclass(frozen=True)
class RankGroups:
    """Groups over which tokens and weights are sharded, and links to the neighbouring stages.

    By default, the rank is the only one of its replica.
    """

    cp: Communicator = field(default_factory=partial(Communicator, "cp"))
    model: ModelGroups = field(default_factory=ModelGroups)
    pipeline: Pipeline = field(default_factory=Pipeline)
    head_copies: Communicator = field(default_factory=partial(Communicator, _HEAD_COPIES))
    """Decode ranks with the same KV heads."""

    @cached_property
    def is_sampling_rank(self) -> bool:
        """Return whether this rank samples tokens, as the first rank of the last stage does."""
        return self.pipeline.is_last and self.cp.rank == 0 and self.model.tp.rank == 0

    @property
    def all(self) -> tuple[Communicator, ...]:
        """Return all groups, each once."""
        return (self.cp, *self.model.all, *self.pipeline.links, self.head_copies)

    def connect(self, device: Device) -> None:
        """Use each group once, as all ranks do at startup. NCCL connects ranks only then, and takes memory for it."""
        for group in self.all:
            tensor = torch.zeros(1, device=device.torch_device)
            group.all_reduce(tensor)
            group.all_gather(tensor.new_empty(group.size), tensor)
            for distance in range(1, group.size):
                group.start_shift(torch.empty_like(tensor), tensor, distance).wait()

    def leave(self) -> None:
        """Leave all groups in parallel, since leaving one may block until another is left. Waiting peers fail."""
        with ThreadPoolExecutor(len(self.all)) as threads:
            list(threads.map(Communicator.destroy, self.all))


def join_groups(spec: WorkerSpec, store: ReplicaStore, model: DecoderConfig, device: Device) -> RankGroups:
    """Join the groups of this rank. All ranks of a replica join their groups in the same order."""
    parallel, rank, resources = spec.pool.parallel, spec.global_rank, spec.config.resources

    def join(name: str, groups: Sequence[Sequence[int]]) -> Communicator:
        members = next(members for members in groups if rank in members)
        return join_group(
            store,
            f"{name}/{members[0]}",
            members,
            rank,
            host=spec.host,
            timeout_s=COLLECTIVE_TIMEOUT_S,
            collectives=resources.collectives,
            device=device,
            use_nccl=resources.uses_nccl,
        )

    by_name = rank_groups(parallel)
    cp, tp, dp = (join(name, by_name[name]) for name in (GroupName.ATTN_CP, GroupName.ATTN_TP, GroupName.ATTN_DP))
    links = {link[0] == rank: join("stages", [link]) for link in stage_links(parallel, rank)}
    groups = ModelGroups(parallel=parallel, global_rank=rank, tp=tp, dp=dp, moe_dispatch=resources.moe_dispatch)
    if model.experts_per_token:
        shards = join(GroupName.MOE_SHARDS, by_name[GroupName.MOE_SHARDS])
        block = tp if shards.size == 1 else join(GroupName.MOE_BLOCK, by_name[GroupName.MOE_BLOCK])
        groups = replace(groups, moe_shards=shards, moe_block=block)
    if spec.pool.linear_shards is not None:
        projections = join(_PROJECTIONS, by_name[GroupName.ATTN_CP])
        groups = replace(groups, projections=projections, linear_shards=spec.pool.linear_shards)
    copies, num_heads = Communicator(_HEAD_COPIES), [group.num_heads for group in model.kv_groups(model.dtype)]
    if spec.role is Role.DECODE and head_copies(num_heads, spec.sizes.tp) > 1:
        copies = join(_HEAD_COPIES, head_copy_groups(positions(parallel), num_heads))
    # Without this exchange, a rank could wait in a collective for a rank that is still joining another group.
    exchange_at_start(store, "joined", rank, spec.world_size, "joined")
    return RankGroups(cp, groups, Pipeline(before=links.get(False), after=links.get(True)), copies)
