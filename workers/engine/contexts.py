"""Choice of a step's attention context; the same on every rank, since it depends on the step plan alone."""

from cluster.spec.strategy import Passing
from workers.attention.interface import AttentionBackend
from workers.engine.attention_context import CpExchange, StepContext
from workers.engine.batch import StepBatch
from workers.engine.gather_context import OverlappedContext, PagedContext
from workers.engine.pass_kv_context import PassKvContext
from workers.engine.pass_q_context import PassQContext
from workers.memory.page_pool import PagePool


def make_context(batch: StepBatch, pool: PagePool, backend: AttentionBackend, exchange: CpExchange) -> StepContext:
    """Return the context. The step's passing matters only if the pool is divided over ranks; None passes keys."""
    kind: type[StepContext]
    if batch.is_sharded:
        kind = PassQContext if batch.shape.passing is Passing.PASS_Q else PassKvContext
    else:
        is_hidden = exchange.group.in_background and not batch.plan.replicated
        kind = OverlappedContext if is_hidden else PagedContext
    return kind(batch, pool, backend, exchange)
