"""An attention backend that knows how long it took, for `baton bench cp`."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from workers.attention.interface import AttentionBackend, GraphAttention, GraphShape, RowAttention, StepAttention
from workers.attention.merge import Partial
from workers.attention.params import AttentionParams
from workers.attention.runs import Run


class TimedAttention:
    """Passes everything on to another backend."""

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend = backend
        self.seconds = 0.0
        """This thread's own time in attention so far."""

    def prepare(
        self,
        runs: Sequence[Run],
        page_tables: Sequence[Tensor],
        page_size: int,
        key_lens: Sequence[int] | None = None,
    ) -> StepAttention:
        """See AttentionBackend."""
        return _Timed(self, self._backend.prepare(runs, page_tables, page_size, key_lens))

    def prepare_rows(self, query_runs: Sequence[Run], key_runs: Sequence[Run]) -> RowAttention:
        """See AttentionBackend."""
        return _Timed(self, self._backend.prepare_rows(query_runs, key_runs))

    def prepare_graph(self, shape: GraphShape) -> GraphAttention | None:
        """See AttentionBackend."""
        return self._backend.prepare_graph(shape)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the time spent in here."""
        start_s = time.thread_time()
        yield
        self.seconds += time.thread_time() - start_s


class _Timed:
    def __init__(self, timer: TimedAttention, attention: StepAttention | RowAttention) -> None:
        self._timer, self._attention = timer, attention

    def attend(self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, /) -> Partial:
        with self._timer.timed():
            return self._attention.attend(query, key, value, params)
