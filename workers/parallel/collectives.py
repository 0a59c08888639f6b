"""Collectives over a group of ranks, and the groups in which layers and pipeline stages communicate.

In a group of one, collectives do nothing and need no library.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from cluster.spec.config import AnyParallel, ParallelConfig
from cluster.spec.errors import PeerLostError
from cluster.spec.linear_shards import LinearShards
from cluster.spec.ranks import Position, moe_tp_size, num_expert_shards, positions, stage_layers
from cluster.spec.strategy import MoeDispatch

SUM_BYTES = 4
_SENDER = 0


class Work(Protocol):
    def wait(self) -> bool:
        """Block until the collective is done. Raises RuntimeError if it fails."""


class Backend(Protocol):
    """Collectives that Communicator needs from a library, named as in torch.distributed."""

    in_background: bool

    def _allgather_base(self, output: Tensor, tensor: Tensor, /) -> Work: ...

    def allreduce(self, tensor: Tensor, /) -> Work: ...

    def broadcast(self, tensor: Tensor, root: int, /) -> Work: ...

    def barrier(self) -> Work: ...

    def shift(self, output: Tensor, tensor: Tensor, distance: int, /) -> Work: ...

    def leave(self) -> None: ...


class CopiedBack:
    """Collective on a copy of a tensor; ``wait`` copies the result back."""

    def __init__(self, work: Work, copy: Tensor, tensor: Tensor) -> None:
        self._work, self._copy, self._tensor = work, copy, tensor

    def wait(self) -> bool:
        done = self._work.wait()
        self._tensor.copy_(self._copy)
        return done


class Pending:
    """Running collective. Do not touch its tensors until ``wait`` returns."""

    def __init__(self, work: Work | None, translated: Callable[[], AbstractContextManager[None]]) -> None:
        self._work = work
        self._translated = translated

    def wait(self) -> None:
        """Block until the collective is done. Raises PeerLostError if it fails. Further calls return immediately."""
        work, self._work = self._work, None
        if work is not None:
            with self._translated():
                work.wait()

    def drop(self) -> None:
        """Forget the collective, which may keep connections open, because this rank leaves the group."""
        self._work = None


Observe = Callable[[str, float, float], None]
"""Callback with a collective's name, start and end. Times are in seconds of ``time.monotonic``."""


class Communicator:
    """One member's view of a group. Every member makes the same calls in the same order.

    Every call raises PeerLostError if a peer is dead or does not respond within the group's timeout. Callers wait
    for collectives in the order in which they start them.
    """

    def __init__(self, name: str, rank: int = 0, size: int = 1, backend: Backend | None = None) -> None:
        assert (size == 1) == (backend is None), f"group {name} of size {size} has the wrong backend"
        self.name = name
        self.rank = rank
        self.size = size
        self.waited_s = 0.0
        """Time in seconds spent starting, copying and waiting. It does not overlap with computation."""
        self.received_bytes = 0
        """Bytes of tensors received from other members. An all-reduce counts as a reduce-scatter and an all-gather."""
        self.in_background = backend is not None and backend.in_background
        """True if collectives progress while this member computes. Otherwise, the calls do all the work."""
        self.observe: Observe | None = None
        """Callback at the end of every call."""
        self._backend = backend
        self._started: WeakSet[Pending] = WeakSet()
        """Collectives that somebody still holds."""

    def all_gather(self, out: Tensor, tensor: Tensor) -> None:
        """Fill ``out [size * n, ...]`` with every member's ``tensor [n, ...]``, by rank. Both are contiguous."""
        self.start_all_gather(out, tensor).wait()

    def start_all_gather(self, out: Tensor, tensor: Tensor) -> Pending:
        """Start an ``all_gather``. ``tensor`` may be this rank's own part of ``out``."""
        assert len(out) == self.size * len(tensor), f"{out.shape} cannot hold {self.size} of {tensor.shape}"
        backend = self._backend
        if backend is None:
            out.copy_(tensor)
        if backend is None or not tensor.numel():
            return Pending(None, nullcontext)
        return self._start("all_gather", out.nbytes - tensor.nbytes, lambda: backend._allgather_base(out, tensor))

    def start_shift(self, out: Tensor, tensor: Tensor, distance: int = 1) -> Pending:
        """Start sending ``tensor`` to rank + ``distance``, and receiving ``out`` from rank - ``distance``.

        Ranks wrap around. Both tensors are contiguous. Their lengths may differ between ranks and may be zero.
        """
        backend = self._backend
        if backend is None or distance % self.size == 0:
            out.copy_(tensor)
            return Pending(None, nullcontext)
        return self._start("shift", out.nbytes, lambda: backend.shift(out, tensor, distance))

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Replace a contiguous ``tensor`` with the sum over all members, and return it.

        The sum is computed in fp32 and rounded once. Every member gets the same bits.
        """
        backend = self._backend
        if backend is not None and tensor.numel():
            # Terms travel in fp32, except in shared memory, where each rank reads and adds them.
            itemsize = SUM_BYTES if self.in_background else tensor.itemsize
            received = 2 * tensor.numel() * itemsize * (self.size - 1) // self.size
            self._start("all_reduce", received, lambda: backend.allreduce(tensor)).wait()
        return tensor

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Overwrite a contiguous ``tensor`` with that of rank ``root``."""
        self.start_broadcast(tensor, root).wait()

    def start_broadcast(self, tensor: Tensor, root: int) -> Pending:
        """Start a ``broadcast``."""
        backend = self._backend
        if backend is None or not tensor.numel():
            return Pending(None, nullcontext)
        received = tensor.nbytes if self.rank != root else 0
        return self._start("broadcast", received, lambda: backend.broadcast(tensor, root))

    def barrier(self) -> None:
        """Return once every member has called this."""
        if self._backend is not None:
            self._start("barrier", 0, self._backend.barrier).wait()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Treat this member as a group of one inside the context, to measure its own work. Nothing is sent."""
        whole = self.rank, self.size, self._backend
        self.rank, self.size, self._backend = 0, 1, None
        try:
            yield
        finally:
            self.rank, self.size, self._backend = whole

    def destroy(self) -> None:
        """Leave the group. Peers' calls that still need this member fail."""
        backend, self._backend = self._backend, None
        for pending in list(self._started):
            pending.drop()
        if backend is not None:
            backend.leave()

    def _start(self, call: str, received_bytes: int, begin: Callable[[], Work]) -> Pending:
        self.received_bytes += received_bytes
        with self._translated(call):
            pending = Pending(begin(), lambda: self._translated(call))
        self._started.add(pending)
        return pending

    @contextmanager
    def _translated(self, call: str) -> Iterator[None]:
        start_s = time.monotonic()
        try:
            yield
        except RuntimeError as exc:
            raise PeerLostError(f"{call} in group {self.name}, rank {self.rank} of {self.size}: {exc}") from exc
        finally:
            end_s = time.monotonic()
            self.waited_s += end_s - start_s
            if self.observe is not None:
                self.observe(call, start_s, end_s)


def gather_exact(group: Communicator, rows: Tensor, lens: Sequence[int]) -> Tensor:
    """Return every rank's ``rows [lens[rank], ...]``, concatenated without padding."""
    out = rows.new_empty((sum(lens), *rows.shape[1:]))
    parts = list(torch.split(out, list(lens)))
    parts[group.rank].copy_(rows)
    for distance in range(1, group.size):
        group.start_shift(parts[(group.rank - distance) % group.size], parts[group.rank], distance).wait()
    return out


def all_to_all(group: Communicator, sends: Sequence[Tensor], lens: Sequence[int]) -> list[Tensor]:
    """Send ``sends[rank]`` to each rank, and return the ``lens[rank]`` rows received from each."""
    own = sends[group.rank]
    received = [own.new_empty((length, *own.shape[1:])) for length in lens]
    received[group.rank] = own
    for distance in range(1, group.size):
        source, target = (group.rank - distance) % group.size, (group.rank + distance) % group.size
        group.start_shift(received[source], sends[target].contiguous(), distance).wait()
    return received


def exchange_counts(group: Communicator, counts: Sequence[int]) -> list[int]:
    """Send each rank a number, and return the numbers received."""
    table = torch.empty(group.size * group.size, dtype=torch.int64)
    group.all_gather(table, torch.tensor(counts, dtype=torch.int64))
    received: list[int] = table.view(group.size, group.size)[:, group.rank].tolist()
    return received


def reduce_scatter_exact(group: Communicator, terms: Tensor, lens: Sequence[int]) -> Tensor:
    """Return this rank's rows of the sum of all ranks' ``terms [sum of lens, ...]``, added in fp32 in rank order."""
    parts = all_to_all(group, torch.split(terms, list(lens)), [lens[group.rank]] * group.size)
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(terms.dtype)


Lens = tuple[int, ...] | None
"""Token count of each attention shard, indexed by dp * cp_size + cp. None if all have the same tokens."""


class TokenExchange:
    """Exchange of tokens between attention shards. A shard is one (dp, cp); its TP ranks have the same tokens."""

    def __init__(self, group: Communicator, shards: Sequence[int], tp: Communicator) -> None:
        """Create an exchange. ``group`` has one rank per shard in ``shards``; ``tp`` has this shard's ranks."""
        assert group.size == len(shards), f"the group has {group.size} ranks for shards {shards}"
        self.group, self.tp, self._shards = group, tp, tuple(shards)

    def gather(self, rows: Tensor, lens: Lens) -> Tensor:
        """Gather the rows of all shards in order, without padding. Equal lengths need only one collective."""
        if lens is None or self.group.size == 1:
            return rows
        own = [lens[shard] for shard in self._shards]
        if len(set(own)) > 1:
            return gather_exact(self.group, rows, own)
        out = rows.new_empty((sum(own), *rows.shape[1:]))
        self.group.all_gather(out, rows)
        return out

    def scatter_sums(self, terms: Tensor, lens: Lens) -> Tensor:
        """Sum ``terms [all tokens, hidden]`` over all ranks. Return the rows of this rank's shard."""
        if lens is None:
            terms = self.group.all_reduce(terms)
        elif self.group.size > 1:
            terms = reduce_scatter_exact(self.group, terms, [lens[shard] for shard in self._shards])
        return self.tp.all_reduce(terms)


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
