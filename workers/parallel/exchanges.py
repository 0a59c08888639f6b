"""Collectives made of shifts: exchanges of unequal numbers of rows, and reduce-scatter."""

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.parallel.collectives import Communicator


def gather_exact(group: Communicator, rows: Tensor, lens: Sequence[int]) -> Tensor:
    """Return every rank's ``rows [lens[rank], ...]``, concatenated, on every rank; nothing is padded."""
    out = rows.new_empty((sum(lens), *rows.shape[1:]))
    parts = list(torch.split(out, list(lens)))
    parts[group.rank].copy_(rows)
    for distance in range(1, group.size):
        group.start_shift(parts[(group.rank - distance) % group.size], parts[group.rank], distance).wait()
    return out


def all_to_all(group: Communicator, sends: Sequence[Tensor], lens: Sequence[int]) -> list[Tensor]:
    """Send ``sends[rank]`` to each rank; return what each sent, ``lens[rank]`` rows, by rank."""
    own = sends[group.rank]
    received = [own.new_empty((length, *own.shape[1:])) for length in lens]
    received[group.rank] = own
    for distance in range(1, group.size):
        source, target = (group.rank - distance) % group.size, (group.rank + distance) % group.size
        group.start_shift(received[source], sends[target].contiguous(), distance).wait()
    return received


def exchange_counts(group: Communicator, counts: Sequence[int]) -> list[int]:
    """Send each rank a number; return the numbers received, by rank."""
    table = torch.empty(group.size * group.size, dtype=torch.int64)
    group.all_gather(table, torch.tensor(counts, dtype=torch.int64))
    received: list[int] = table.view(group.size, group.size)[:, group.rank].tolist()
    return received


def reduce_scatter_exact(group: Communicator, terms: Tensor, lens: Sequence[int]) -> Tensor:
    """Add up ``terms [sum of lens, ...]`` of every rank in fp32, in the order of ranks; each rank gets its own rows."""
    parts = all_to_all(group, torch.split(terms, list(lens)), [lens[group.rank]] * group.size)
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(terms.dtype)
