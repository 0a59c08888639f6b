"""Ring mode, pass-KV: each rank's keys, including cached ones, circulate; each rank stores the new ones it owns."""

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor

from cluster.spec.kv import pages_for
from workers.attention.interface import AttentionBackend, AttentionParams
from workers.attention.merge import Partial
from workers.attention.runs import RankRuns, Run
from workers.engine.attention_context import CpExchange, StepContext
from workers.engine.batch import StepBatch
from workers.memory.page_pool import PagePool


class PassKvContext(StepContext):
    """Context that passes blocks: a rank's part of each request's prefix, then its new rows.

    If every rank computes every token, new rows are everywhere already and only prefixes circulate.
    """

    def __init__(self, batch: StepBatch, pool: PagePool, backend: AttentionBackend, exchange: CpExchange) -> None:
        super().__init__(batch, pool, backend, exchange)
        plan, rank = batch.plan, batch.cp_rank
        self._prefix_lens = [sum(shares) for shares in batch.prefix_shares]
        self._lens = [
            prefix_len + (0 if plan.replicated else new_len)
            for prefix_len, new_len in zip(self._prefix_lens, plan.lens, strict=True)
        ]
        self._prefix_pages = [
            (table[: pages_for(share, batch.page_size)], share)
            for table, share in zip(batch.pages[0].tables, batch.prefix_share, strict=True)
            if share
        ]
        self._rows = [self.prepare_rows(self._key_runs(source)) for source in range(plan.cp)]
        sources = [rank] if plan.replicated else range(plan.cp)
        self._owned = {source: self.owned_rows(source) for source in sources}

    def put(self, layer: int, k: Tensor, v: Tensor) -> None:
        rank, ring = self.batch.cp_rank, self.exchange.ring
        prefix_len = self._prefix_lens[rank]
        num_rows = prefix_len + len(k)
        block = ring.own(num_rows + self.batch.page_size, self._lens, (k.shape[1], sum(self.pool.widths(layer))), k)
        self._block = block[:num_rows]
        self._read_prefix(layer, block)
        torch.cat((k, v), dim=-1, out=self._block[prefix_len:])
        ring.start()

    def attend_storing(self, layer: int, q: Tensor, params: AttentionParams) -> Tensor:
        return self.joined(q, list(self._partials(layer, q, params)), params)

    def _read_prefix(self, layer: int, block: Tensor) -> None:
        """Read whole pages, which is faster; what follows overwrites anything beyond a share."""
        begin = 0
        for pages, share in self._prefix_pages:
            self.pool.read_pages(layer, pages, block[begin : begin + len(pages) * self.batch.page_size])
            begin += share

    def _partials(self, layer: int, q: Tensor, params: AttentionParams) -> Iterator[Partial]:
        """Attend every block with keys for this rank, and store what this rank owns of it."""
        for source, block in chain([(self.batch.cp_rank, self._block)], self.exchange.ring.others()):
            if source in self._owned:
                self._owned[source].store(layer, block[self._prefix_lens[source] :])
            rows = self._rows[source]
            if rows is not None:
                yield rows.attend(q, *self.pool.split(layer, block), params)

    def _key_runs(self, source: int) -> RankRuns:
        """Return the key runs of a rank's block; all of a prefix precedes every new token."""
        plan = self.batch.plan
        shares = self.batch.prefix_shares[source]
        prefixes = tuple(Run(request, 0, share, 1) for request, share in enumerate(shares) if share)
        is_passed = source == self.batch.cp_rank or not plan.replicated
        return prefixes + plan.runs[source] if is_passed else prefixes
