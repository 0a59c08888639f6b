"""What a model's attention layers talk to during one step: K and V go in, attention comes out, CP stays hidden."""

from collections import Counter

from torch import Tensor

from workers.attention.interface import AttentionBackend
from workers.cache.page_pool import PagePool
from workers.context_parallel.gather import KvGather, gather_rows
from workers.engine.batch import StepBatch


class PagedAttentionContext:
    """Implements the AttentionContext of workers.models.interface for one step on one rank.

    Every rank of the CP group makes the same calls for the same step, also one that has no token in it.
    """

    def __init__(self, batch: StepBatch, pool: PagePool, backend: AttentionBackend, gather: KvGather) -> None:
        assert batch.page_size == pool.page_size, f"pages of {batch.page_size} and of {pool.page_size} tokens"
        self._batch = batch
        self._pool = pool
        self._gather = gather
        self._attention = backend.prepare(batch.runs, batch.page_tables, batch.page_size)

    def put(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Exchange this rank's ``k`` and ``v [tokens, kv_heads, dim]`` over the group, and store all of them."""
        self._pool.write(layer, self._batch.slots, self._gather.gather(self._batch.plan, k, v))

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """Causal attention of ``q [tokens, heads, dim]`` over cached prefix and new tokens; after ``put``."""
        return self._attention.attend(q, *self._pool.layer_view(layer)).out

    def join_last(self, hidden: Tensor) -> Tensor:
        """The last token of every sampled row, ``[R, hidden]``, on every rank; ``hidden [tokens, hidden]`` is local."""
        batch = self._batch
        if batch.plan.replicated:
            return hidden[[owner.offset for owner in batch.sampled]]
        counts: Counter[int] = Counter()
        places = []
        for owner in batch.sampled:
            places.append((owner.cp_rank, counts[owner.cp_rank]))
            counts[owner.cp_rank] += 1
        most = max(counts.values(), default=0)
        mine = [owner.offset for owner in batch.sampled if owner.cp_rank == batch.cp_rank]
        gathered = gather_rows(self._gather.group, hidden[mine], most)
        return gathered[[cp_rank * most + place for cp_rank, place in places]]
