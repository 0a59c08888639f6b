"""Exchange of rows between CP ranks: K and V or Q in every layer, partials, and hidden states at the end of a step."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from workers.attention.merge import Partial
from workers.context_parallel.shard_plan import ShardPlan
from workers.device import on_device
from workers.parallel.collectives import Communicator, Pending


class Gathered:
    """Rows of all ranks in transit, in gathered order."""

    def __init__(self, rows: Tensor, plan: ShardPlan, pending: Pending | None) -> None:
        self._rows, self._plan, self._pending = rows, plan, pending

    def wait(self) -> Tensor:
        """Wait and return all rows, ``[gathered rows, ...]``; padding holds anything, finite or not, and must not be
        read.
        """
        if self._pending is not None:
            self._pending.wait()
        return self._rows

    def of_rank(self, cp_rank: int) -> Tensor:
        """Return the rows of one rank in its local order; call ``wait`` first."""
        if self._plan.replicated:
            return self._rows
        begin = cp_rank * self._plan.padded_len
        return self._rows[begin : begin + self._plan.lens[cp_rank]]


class RowGather:
    """Gather of one kind of rows over a CP group, one collective at a time; owned by a worker, reused for every layer.

    The buffer grows to the largest step seen and stays allocated.
    """

    def __init__(self, group: Communicator) -> None:
        self.group = group
        self._rows: Tensor | None = None

    def start(self, plan: ShardPlan, *parts: Tensor) -> Gathered:
        """Send this rank's rows, ``parts [tokens, heads, dim]`` side by side: ``[tokens, heads, sum of dims]``.

        The result is valid until the next call.
        """
        if plan.replicated:
            return Gathered(torch.cat(parts, dim=-1), plan, None)
        assert plan.cp == self.group.size, f"a plan for {plan.cp} ranks in a group of {self.group.size}"
        row_shape = (parts[0].shape[1], sum(part.shape[-1] for part in parts))
        self._rows = at_least(self._rows, plan.cp * plan.padded_len, row_shape, parts[0])
        rows = self._rows[: plan.cp * plan.padded_len]
        mine = rows[self.group.rank * plan.padded_len :][: plan.padded_len]
        torch.cat(parts, dim=-1, out=mine[: len(parts[0])])
        return Gathered(rows, plan, self.group.start_all_gather(rows, mine))


def gather_rows(group: Communicator, rows: Tensor, padded_len: int) -> Tensor:
    """Return every rank's ``rows [n, ...]``, n at most ``padded_len``, as ``[size * padded_len, ...]``; padding is
    zero.
    """
    send = rows.new_zeros((padded_len, *rows.shape[1:]))
    send[: len(rows)] = rows
    out = rows.new_empty((group.size * padded_len, *rows.shape[1:]))
    group.all_gather(out, send)
    return out


def join_rows(group: Communicator, plan: ShardPlan, rows: Tensor) -> Tensor:
    """Return every rank's local ``rows [tokens, ...]`` as ``[num_tokens, ...]`` in the order of the flattened batch."""
    if plan.replicated:
        return rows
    gathered = gather_rows(group, rows, plan.padded_len)
    return gathered[on_device(torch.from_numpy(plan.inverse), rows.device)]


def at_least(buffer: Tensor | None, num_rows: int, row_shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return the buffer, or a new one ``[num_rows or more, *row_shape]`` if it has too few rows or another row shape.

    It grows by a quarter at least: a prompt's chunks each need a little more than those before.
    """
    if buffer is None or buffer.shape[1:] != row_shape or buffer.dtype != like.dtype:
        return like.new_zeros((num_rows, *row_shape))
    if len(buffer) < num_rows:
        return like.new_zeros((max(num_rows, len(buffer) * 5 // 4), *row_shape))
    return buffer


class HomewardPartials:
    """Partials on their way to the ranks that own the queries. Out and lse travel together, in fp32."""

    def __init__(self, group: Communicator, found: Partial, homes: Sequence[Tensor]) -> None:
        """Send ``found``, this rank's partial of the queries of all ranks.

        ``homes[rank]`` are int64 indices into it: the queries of a rank, in the order that it wants them in.
        """
        packed = torch.cat((found.out.float(), found.lse[..., None]), dim=-1)
        self._own = packed[homes[group.rank]]
        self._arriving: list[tuple[Tensor, Pending]] = []
        for distance in range(1, group.size):
            out = torch.empty_like(self._own)
            theirs = packed[homes[(group.rank + distance) % group.size]]
            self._arriving.append((out, group.start_shift(out, theirs, distance)))

    def wait(self) -> Iterator[Partial]:
        """Yield the partials of this rank's own queries over the keys of each rank, including its own."""
        yield _unpacked(self._own)
        for packed, pending in self._arriving:
            pending.wait()
            yield _unpacked(packed)


def _unpacked(packed: Tensor) -> Partial:
    return Partial(packed[..., :-1], packed[..., -1])
