"""Groups in which a model's layers and its pipeline stages communicate."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from torch import Tensor

from cluster.spec.config import AnyParallel, ParallelConfig
from cluster.spec.linear_shards import LinearShards
from cluster.spec.ranks import Position, moe_tp_size, num_expert_shards, positions, stage_layers
from cluster.spec.strategy import MoeDispatch
from workers.parallel.communicator import Communicator

_SENDER = 0


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Links of a rank to its neighbouring pipeline stages. By default, the rank is the only stage.

    A link is a group of two ranks. Sending blocks only while two earlier sends have not been received.
    """

    before: Communicator | None = None
    after: Communicator | None = None

    @property
    def is_first(self) -> bool:
        return self.before is None

    @property
    def is_last(self) -> bool:
        return self.after is None

    @property
    def links(self) -> tuple[Communicator, ...]:
        return tuple(link for link in (self.before, self.after) if link is not None)

    def receive(self, hidden: Tensor) -> Tensor:
        """Fill ``hidden [tokens, hidden]`` from the previous stage. The step plan determines its size."""
        if self.before is not None:
            self.before.broadcast(hidden, _SENDER)
        return hidden

    def send(self, hidden: Tensor) -> None:
        if self.after is not None:
            self.after.broadcast(hidden.contiguous(), _SENDER)


class Part(NamedTuple):
    rank: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelGroups:
    """Groups in which the model's layers communicate. By default, one rank has the entire model."""

    parallel: AnyParallel = field(default_factory=ParallelConfig)
    global_rank: int = 0
    tp: Communicator = field(default_factory=partial(Communicator, "attn_tp"))
    dp: Communicator = field(default_factory=partial(Communicator, "attn_dp"))
    """Attention shards whose ranks together hold a dense MLP."""
    moe_shards: Communicator = field(default_factory=partial(Communicator, "moe_shards"))
    """Attention shards whose ranks together hold the experts."""
    moe_block: Communicator = field(default_factory=partial(Communicator, "moe_block"))
    """All ranks that together hold the experts."""
    moe_dispatch: MoeDispatch = MoeDispatch.AUTO
    projections: Communicator = field(default_factory=partial(Communicator, "projections"))
    """CP ranks that store a stage's query and output projections together. Nothing else is sent in this group, so that
    weights and KV do not wait for each other.
    """
    linear_shards: LinearShards | None = None
    """Division of these projections. None if every rank stores all of them."""

    @property
    def position(self) -> Position:
        return positions(self.parallel)[self.global_rank]

    def layers(self, num_layers: int) -> range:
        return stage_layers(num_layers, self.parallel.pp, self.position.pp)

    @property
    def dense_width(self) -> Part:
        """Return this rank's shard of a dense MLP's width."""
        at = self.position
        return Part(at.dp * self.parallel.tp + at.tp, self.parallel.dp * self.parallel.tp)

    @property
    def dense_shards(self) -> range:
        """Return the attention shards in ``dp``, numbered dp * cp_size + cp."""
        cp = self.parallel.cp
        return range(self.position.cp, self.parallel.dp * cp, cp)

    @property
    def expert_shards(self) -> range:
        """Return the attention shards in ``moe_shards``, numbered dp * cp_size + cp."""
        num = num_expert_shards(self.parallel)
        return range(self.position.moe_dp * num, (self.position.moe_dp + 1) * num)

    @property
    def expert_width(self) -> Part:
        """Return this rank's shard of the width of each of its experts."""
        return Part(self.position.moe_tp, moe_tp_size(self.parallel))

    @property
    def all(self) -> tuple[Communicator, ...]:
        """Return all groups, each once."""
        groups = (self.tp, self.dp, self.moe_shards, self.moe_block, self.projections)
        return tuple({id(group): group for group in groups}.values())

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Treat this rank as the only one inside the context, to measure its own work. Nothing is sent."""
        with ExitStack() as stack:
            for group in self.all:
                stack.enter_context(group.alone())
            yield
