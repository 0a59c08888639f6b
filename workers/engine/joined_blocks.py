"""Blocks of rows that circulate among ranks, joined for a layer that selects keys."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import add

import torch
from torch import Tensor

from cluster.spec.kv import pages_for
from workers.attention.interface import AttentionBackend
from workers.attention.runs import RankRuns
from workers.device import device_of
from workers.engine.batch import StepBatch
from workers.engine.owned_pages import OwnedPages
from workers.engine.selected_keys import SelectableKeys


class JoinedBlocks:
    """All ranks' blocks of a layer in pages: every key of the step, in order of position.

    Keys can only be selected when all are known, so each rank holds all keys of a layer while it attends to them.
    """

    def __init__(self, backend: AttentionBackend, batch: StepBatch, key_runs: Sequence[RankRuns]) -> None:
        """Plan the pages. ``key_runs[rank]`` are the runs in a rank's block: first of prefixes, numbered by that rank,
        then of new tokens.
        """
        shards, device = batch.shards, device_of(batch.token_ids)
        lens = map(add, shards.prefix_lens, shards.extend_lens)
        begins = list(accumulate((pages_for(length, batch.page_size) for length in lens), initial=0))
        self.num_slots = begins[-1] * batch.page_size
        tables = device.put(torch.arange(begins[-1])).split_with_sizes([end - begin for begin, end in pairwise(begins)])
        self.keys = SelectableKeys(backend, batch.runs, tables, OwnedPages(1, (0,) * len(tables), batch.page_size))
        self.slots: list[Tensor] = []
        """Slots of the rows in each rank's block."""
        for source, runs in enumerate(key_runs):
            owned, lens_of_prefixes = batch.owned_by(source), batch.prefix_lens_by_owner[source]
            num_prefixes = sum(length > 0 for length in lens_of_prefixes)
            positions = [torch.arange(0)]
            for number, run in enumerate(runs):
                own = torch.arange(run.count) * run.step + run.first_position
                held = owned.positions(owned.firsts[run.request], own) if number < num_prefixes else own
                positions.append(held + begins[run.request] * batch.page_size)
            self.slots.append(device.put(torch.cat(positions)))
