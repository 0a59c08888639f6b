"""A rank's groups, which are ready before the first request."""

from unittest.mock import Mock

from workers.device import CPU
from workers.engine.rank_groups import RankGroups
from workers.parallel.communicator import Communicator
from workers.parallel.model_groups import ModelGroups, Pipeline


def test_every_group_is_used_at_startup() -> None:
    """NCCL connects two ranks when they first exchange something."""
    backends = {name: Mock(in_background=True) for name in ("cp", "tp", "moe_block", "stages", "head_copies")}
    cp, tp, block, link, copies = (Communicator(name, 1, 3, backend) for name, backend in backends.items())
    groups = RankGroups(cp, ModelGroups(tp=tp, moe_block=block), Pipeline(before=link), copies)
    groups.connect(CPU)
    for backend in backends.values():
        used = [each[0] for each in backend.method_calls]
        assert used == ["all_reduce", "all_gather", "shift", "shift"]
        assert [distance for _, _, distance in (given.args for given in backend.shift.call_args_list)] == [1, 2]
