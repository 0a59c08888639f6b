"""Choice of a step's attention context.

A context is the engine side of attention during one step. Layers pass Q, K and V and get the attention output, and do
not know about context parallelism.

If a layer expands keys, every context attends to the prefix and to each rank's new rows in turn, because only these can
be expanded a tile at a time.
"""

from cluster.spec.strategy import Passing
from workers.attention.interface import AttentionBackend
from workers.engine.batch import StepBatch
from workers.engine.gather_contexts import OverlappedContext, PagedContext
from workers.engine.ring_contexts import PassKvContext, PassQContext
from workers.engine.step_context import CpExchange, StepContext
from workers.memory.page_pool import PagePool


def make_context(batch: StepBatch, pool: PagePool, backend: AttentionBackend, exchange: CpExchange) -> StepContext:
    kind: type[StepContext]
    if batch.is_sharded:
        kind = PassQContext if batch.shape.passing is Passing.PASS_Q else PassKvContext
    else:
        kind = OverlappedContext if exchange.overlaps(batch) else PagedContext
    return kind(batch, pool, backend, exchange)
