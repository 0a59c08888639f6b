"""Process that loads a rank's part of a model when it reads a line: python -m tests.fakes.loading_rank JSON

It reports that it is ready, then the sizes of its part and of its largest weight, and waits for the end of its input.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cluster.spec.config import ParallelConfig
from cluster.spec.linear_shards import LinearShards
from cluster.spec.ranks import GroupName, groups
from workers.engine.weights import load_model, torch_dtype
from workers.parallel.communicator import Communicator
from workers.parallel.model_groups import ModelGroups

_NO_BACKEND: Any = SimpleNamespace(in_background=False)


def groups_of(axes: Mapping[str, int], global_rank: int, linear_shards: LinearShards | None = None) -> ModelGroups:
    """Return the groups of a rank without peers, in which nothing can be computed."""
    parallel = ParallelConfig(**axes)
    all_members = groups(parallel)

    def group(name: GroupName) -> Communicator:
        members = next(members for members in all_members[name] if global_rank in members)
        return Communicator(name, members.index(global_rank), len(members), _NO_BACKEND if len(members) > 1 else None)

    return ModelGroups(
        parallel=parallel,
        global_rank=global_rank,
        tp=group(GroupName.ATTN_TP),
        dp=group(GroupName.ATTN_DP),
        moe_shards=group(GroupName.MOE_SHARDS),
        moe_block=group(GroupName.MOE_BLOCK),
        projections=group(GroupName.ATTN_CP),
        linear_shards=linear_shards,
    )


def main(folder: str, axes: Mapping[str, int], global_rank: int, dtype: str, reads_whole_files: bool) -> None:
    """Load like a worker. With ``reads_whole_files``, also keep every file in memory, which tests must detect."""
    groups = groups_of(axes, global_rank)
    print("ready", flush=True)
    sys.stdin.readline()
    files = [path.read_bytes() for path in Path(folder).glob("*.safetensors")] if reads_whole_files else []
    model = load_model(Path(folder), dtype=torch_dtype(dtype), groups=groups)
    model.pack()
    weights = [*model.parameters(), *(packed.matrix for packed in model.packed_matrices())]
    # All experts share one tensor.
    largest = max(weight.nbytes // (len(weight) if weight.dim() == 3 else 1) for weight in weights)
    print(sum(weight.nbytes for weight in weights), largest, flush=True)
    sys.stdin.read()
    del files


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
