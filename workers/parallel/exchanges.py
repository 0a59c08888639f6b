"""Exchanges between ranks that have different numbers of rows, such as the tokens of attention shards."""

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.parallel.communicator import Communicator


def gather_rows(group: Communicator, rows: Tensor, padded_len: int) -> Tensor:
    """Gather every rank's ``rows [n, ...]``, zero-padded to ``padded_len``, as ``[size * padded_len, ...]``."""
    send = rows.new_zeros((padded_len, *rows.shape[1:]))
    send[: len(rows)] = rows
    out = rows.new_empty((group.size * padded_len, *rows.shape[1:]))
    group.all_gather(out, send)
    return out


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
