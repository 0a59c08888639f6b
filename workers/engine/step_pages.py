"""Pages and slots of a step in one rank's pool."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cluster.spec.kv import pages_for
from workers.context_parallel.shard_plan import Indices, ShardPlan
from workers.device import Device

_NO_PAGES = np.empty(0, dtype=np.int64)


class StepPages(NamedTuple):
    """Pages of one lifetime in a step, on one rank."""

    slots: Tensor
    """KV slots ``[gathered rows]`` int64. Padding and other owners' tokens go to the null slot."""
    slots_on_host: Indices
    tables: tuple[Tensor, ...]
    """Pages by request, int64, in order of position."""


@dataclass(frozen=True, slots=True)
class PageOwners:
    """Division of a pool among n owners, as seen by one of them. Page p is page p // n of owner p % n."""

    num: int
    own: int
    page_size: int
    null_slot: int

    def tables(self, tables: Sequence[Indices]) -> Sequence[Indices]:
        """Return this owner's pages of each request."""
        if self.num == 1:
            return tables
        return [table[table % self.num == self.own] // self.num for table in tables]

    def slots(self, pages: Indices, positions: Indices) -> Indices:
        """Return the slots of tokens in these pages. Other owners' tokens go to the null slot."""
        in_page = positions % self.page_size
        if self.num == 1:
            return pages * self.page_size + in_page
        return np.where(pages % self.num == self.own, pages // self.num * self.page_size + in_page, self.null_slot)

    def firsts(self, tables: Sequence[Indices]) -> tuple[int, ...]:
        """Return the owner of each request's first page."""
        return tuple(int(table[0]) % self.num if len(table) else 0 for table in tables)

    def prefix_lens(self, prefix_lens: Sequence[int], tables: Sequence[Indices]) -> tuple[tuple[int, ...], ...]:
        """Return the number of prefix tokens in each owner's pages, by owner and request."""
        if self.num == 1:
            return (tuple(prefix_lens),)
        lens = np.zeros((self.num, len(tables)), dtype=np.int64)
        for request, (prefix_len, table) in enumerate(zip(prefix_lens, tables, strict=True)):
            held = np.clip(prefix_len - np.arange(len(table)) * self.page_size, 0, self.page_size)
            np.add.at(lens[:, request], table % self.num, held)
        return tuple(tuple(int(length) for length in of_owner) for of_owner in lens)


def make_step_pages(
    shards: ShardPlan, positions: Indices, tables: Sequence[Indices], owners: PageOwners, device: Device
) -> StepPages:
    """Return one lifetime's pages, given its tables by request and the positions of the flattened batch's tokens."""
    own = owners.tables(tables)
    together = device.put(torch.from_numpy(np.concatenate([_NO_PAGES, *own])))
    slots = owners.slots(_pages(shards, positions, tables, owners.page_size), positions)
    if not shards.is_replicated:
        slots = np.append(slots, owners.null_slot)[shards.gathered_index]
    return StepPages(
        device.put(torch.from_numpy(slots)), slots, together.split_with_sizes([len(table) for table in own])
    )


def _pages(shards: ShardPlan, positions: Indices, tables: Sequence[Indices], page_size: int) -> Indices:
    """Return the page of every token in the flattened batch. Only the table entries of new tokens are read."""
    used, num_used = [_NO_PAGES], 0
    entries: list[int] = []
    for prefix_len, extend_len, table in zip(shards.prefix_lens, shards.extend_lens, tables, strict=True):
        first, end = prefix_len // page_size, pages_for(prefix_len + extend_len, page_size)
        assert len(table) >= end, f"request {len(entries)} has {len(table)} pages but needs {end}"
        used.append(table[first:end])
        entries.append(num_used - first)
        num_used += len(used[-1])
    pages: Indices = np.concatenate(used)[
        np.repeat(np.array(entries, np.int64), shards.extend_lens) + positions // page_size
    ]
    return pages
