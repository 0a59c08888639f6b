"""Pipeline stage inside one process. Every rank is a thread with communicators for all groups in its layout."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

import torch

from cluster.spec.config import ParallelConfig
from cluster.spec.ranks import GroupName, groups, sizes_of, world_size
from cluster.spec.strategy import MoeDispatch
from tests.fakes.thread_group import ThreadBackend
from workers.parallel.communicator import Communicator
from workers.parallel.model_groups import ModelGroups

T = TypeVar("T")


def on_thread_layout(
    parallel: ParallelConfig, function: Callable[[ModelGroups], T], dispatch: MoeDispatch = MoeDispatch.AUTO
) -> list[T]:
    """Call a function on all ranks of a layout in parallel. Return the results by rank."""
    num_ranks = world_size(sizes_of(parallel))
    barriers: list[Barrier] = []
    communicators: list[dict[GroupName, Communicator]] = [{} for _ in range(num_ranks)]
    for name, found in groups(parallel).items():
        for members in found:
            barriers.append(Barrier(len(members), timeout=20))
            board = [torch.empty(0)] * len(members)
            for rank, member in enumerate(members):
                backend = ThreadBackend(rank, board, barriers[-1], in_background=True)
                alone = len(members) == 1
                communicators[member][name] = Communicator(name, rank, len(members), None if alone else backend)

    def call(rank: int) -> T:
        try:
            return function(_groups_of(parallel, rank, communicators[rank], dispatch))
        except BaseException:
            for barrier in barriers:
                barrier.abort()
            raise

    with ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(call, range(num_ranks)))


def tp_groups(tp: Communicator) -> ModelGroups:
    """Return the groups of a rank with TP only."""
    return ModelGroups(parallel=ParallelConfig(tp=tp.size), global_rank=tp.rank, tp=tp, moe_block=tp)


def _groups_of(
    parallel: ParallelConfig, rank: int, named: Mapping[GroupName, Communicator], dispatch: MoeDispatch
) -> ModelGroups:
    return ModelGroups(
        parallel=parallel,
        global_rank=rank,
        tp=named[GroupName.ATTN_TP],
        dp=named[GroupName.ATTN_DP],
        moe_shards=named[GroupName.MOE_SHARDS],
        moe_block=named[GroupName.MOE_BLOCK],
        moe_dispatch=dispatch,
    )
