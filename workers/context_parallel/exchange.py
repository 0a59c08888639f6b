"""Exchange of rows between CP ranks: gathers, the ring, returning partials, and joining hidden states after a step."""

from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from workers.attention.merge import Partial
from workers.context_parallel.shard_plan import ShardPlan
from workers.device import device_of
from workers.parallel.communicator import Communicator, OpenGather, Pending
from workers.parallel.exchanges import gather_rows


class PendingGather:
    """Rows of all ranks in transit, in gathered order."""

    def __init__(self, rows: Tensor, plan: ShardPlan, pending: Pending | None) -> None:
        self._rows, self._plan, self._pending = rows, plan, pending

    def wait(self) -> Tensor:
        """Wait for all rows and return them, ``[gathered rows, ...]``. Padding may contain anything, even NaN."""
        if self._pending is not None:
            self._pending.wait()
        return self._rows

    def of_rank(self, cp_rank: int) -> Tensor:
        """Return one rank's rows in that rank's local order. Call ``wait`` first."""
        return self._rows[self._plan.gathered_rows(cp_rank)]


class SharedRows:
    """Rows of all ranks in memory that all of them read, valid until the group's next collective.

    Write this rank's rows before calling ``arriving``.
    """

    def __init__(self, opened: OpenGather[Pending], rows: Sequence[Tensor], plan: ShardPlan, rank: int) -> None:
        self.own = rows[rank]
        self._opened, self._rows, self._plan, self._rank = opened, rows, plan, rank

    @classmethod
    def open(
        cls, group: Communicator, plan: ShardPlan, row_shape: tuple[int, ...], dtype: torch.dtype
    ) -> "SharedRows | None":
        """Return memory for rows ``[tokens, *row_shape]`` of each rank, or None if the group does not share memory."""
        opened = group.open_all_gather(plan.padded_len * prod(row_shape) * dtype.itemsize)
        if opened is None:
            return None
        padded = (part.view(dtype).view(-1, *row_shape) for part in opened.parts)
        rows = [part[:num_rows] for part, num_rows in zip(padded, plan.lens, strict=True)]
        return cls(opened, rows, plan, group.rank)

    def arriving(self) -> Iterator[tuple[slice, Tensor]]:
        """Send this rank's rows. Yield these, and then those of the others, with their places in gathered order."""
        pending = self._opened.start()
        yield self._plan.gathered_rows(self._rank), self.own
        pending.wait()
        for rank, rows in enumerate(self._rows):
            if rank != self._rank:
                yield self._plan.gathered_rows(rank), rows


class RowGather:
    """Gather of one kind of row over a CP group, one collective at a time. Owned by a worker and reused for every
    layer.

    The buffer grows to the largest step so far and stays allocated.
    """

    def __init__(self, group: Communicator) -> None:
        self.group = group
        self._buffer = _RowBuffer()

    def start(self, plan: ShardPlan, *parts: Tensor) -> PendingGather:
        """Send this rank's rows, the concatenation of ``parts [tokens, heads, dim]``: ``[tokens, heads, sum of dims]``.

        The result is valid until the next call.
        """
        if plan.is_replicated:
            return PendingGather(torch.cat(parts, dim=-1), plan, None)
        assert plan.cp == self.group.size, f"the plan is for {plan.cp} ranks, but the group has {self.group.size}"
        row_shape = parts[0].shape[1], sum(part.shape[-1] for part in parts)
        rows = self._buffer.rows(plan.cp * plan.padded_len, row_shape, parts[0])
        torch.cat(parts, dim=-1, out=rows[plan.gathered_rows(self.group.rank)])
        mine = rows[self.group.rank * plan.padded_len :][: plan.padded_len]
        return PendingGather(rows, plan, self.group.start_all_gather(rows, mine))


class Ring:
    """Ring with one round per layer: fill ``own``, call ``start``, process this rank's block, then ``others``.

    Owned by a worker. While a block is being processed, it is sent to the next rank, and the following block arrives.
    The two buffers grow to the largest block so far and stay allocated.
    """

    _held: Tensor
    """Block of this rank, or the one that arrived last."""
    _arriving: Tensor

    def __init__(self, group: Communicator) -> None:
        self.group = group
        self._buffers = _RowBuffer(), _RowBuffer()
        self._pending: Pending | None = None
        self._lens: Sequence[int] = ()

    def own(self, num_rows: int, lens: Sequence[int], row_shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return the buffer for this rank's block in the next round, ``[num_rows, *row_shape]``.

        Only the first ``lens[r]`` rows of rank r's block are passed on; ``lens`` is the same on every rank. The result
        is valid until ``others`` yields its first block.
        """
        self._lens = lens
        capacity = max(num_rows, *lens)
        self._held, self._arriving = (buffer.rows(capacity, row_shape, like) for buffer in self._buffers)
        return self._held[:num_rows]

    def start(self) -> None:
        """Send this rank's block. Do not write to it before ``others`` yields its first block."""
        self._pass_on(self.group.rank)

    def others(self) -> Iterator[tuple[int, Tensor]]:
        """Yield (rank, block) for every other rank that has rows, starting with the preceding rank.

        A block is valid until the next one is requested.
        """
        for distance in range(1, self.group.size):
            source = (self.group.rank - distance) % self.group.size
            if self._pending is not None:
                self._pending.wait()
            self._held, self._arriving = self._arriving, self._held
            if distance + 1 < self.group.size:
                self._pass_on(source)
            if self._lens[source]:
                yield source, self._held[: self._lens[source]]

    def _pass_on(self, source: int) -> None:
        """Send the current block, that of rank ``source``, and receive the preceding rank's. Skip empty blocks."""
        self._pending = None
        if any(self._lens):
            previous = (source - 1) % self.group.size
            self._pending = self.group.start_shift(
                self._arriving[: self._lens[previous]], self._held[: self._lens[source]]
            )


class HomewardPartials:
    """Partials in transit to the ranks that own their queries. Out and lse travel together, in fp32."""

    def __init__(self, group: Communicator, found: Partial, homes: Sequence[Tensor]) -> None:
        """Send ``found``, this rank's partial for the queries of all ranks.

        ``homes[rank]`` holds the int64 indices of that rank's queries in ``found``, in that rank's own order.
        """
        self._own = _packed(found, homes[group.rank])
        self._arriving: list[tuple[Tensor, Pending]] = []
        for distance in range(1, group.size):
            out = torch.empty_like(self._own)
            theirs = _packed(found, homes[(group.rank + distance) % group.size])
            self._arriving.append((out, group.start_shift(out, theirs, distance)))

    def wait(self) -> Iterator[Partial]:
        """Yield the partials of this rank's own queries over the keys of each rank, including its own."""
        yield _unpacked(self._own)
        for packed, pending in self._arriving:
            pending.wait()
            yield _unpacked(packed)


def join_rows(group: Communicator, plan: ShardPlan, rows: Tensor) -> Tensor:
    """Return every rank's local ``rows [tokens, ...]`` as ``[num_tokens, ...]`` in the order of the flattened batch."""
    if plan.is_replicated:
        return rows
    gathered = gather_rows(group, rows, plan.padded_len)
    return gathered.index_select(0, device_of(rows).put(torch.from_numpy(plan.inverse)))


class _RowBuffer:
    """Memory for rows. It grows to the largest step so far and serves layers with rows of different shapes."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def rows(self, num_rows: int, row_shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return memory ``[num_rows, *row_shape]``, with the dtype and device of ``like``.

        New memory is at least a quarter larger, since each chunk of a prompt needs a little more than the previous one.
        """
        size = num_rows * prod(row_shape)
        if self._memory is None or self._memory.dtype != like.dtype:
            self._memory = like.new_zeros(size)
        elif len(self._memory) < size:
            self._memory = like.new_zeros(max(size, len(self._memory) * 5 // 4))
        return self._memory[:size].view(num_rows, *row_shape)


def _packed(found: Partial, queries: Tensor) -> Tensor:
    return torch.cat((found.out[queries].float(), found.lse[queries][..., None]), dim=-1)


def _unpacked(packed: Tensor) -> Partial:
    return Partial(packed[..., :-1], packed[..., -1])
