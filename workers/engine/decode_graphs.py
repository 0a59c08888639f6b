"""Decode steps that are recorded once for some batch sizes and replayed, which takes the host next to no time."""

import logging
import sys
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cluster.spec.decode_graphs import batch_sizes
from cluster.spec.kv import pages_for
from cluster.spec.strategy import MoeDispatch
from workers.attention.triton.decode import DecodeAttention
from workers.engine.batch import BatchRow
from workers.engine.begun_step import Followed
from workers.engine.gpu_recorder import Record, RecordingError
from workers.expert_parallel.token_dispatcher import FEW_TOKENS
from workers.expert_parallel.token_exchange import Lens
from workers.layers.experts import FEW_CHOICES
from workers.memory.page_pool import PagePool
from workers.models.decoder import DecoderModel
from workers.row_kernels import KvPlace

REPLAYED = "replayed"

_log = logging.getLogger(__name__)


class DecodeGraphs:
    """Replays steps in which each request has one token, which is drawn from. Other steps go the usual way."""

    def __init__(self, model: DecoderModel, pool: PagePool, most_requests: int, record: Record) -> None:
        self.counts: Counter[str] = Counter()
        """Steps replayed, and those that were not, by reason."""
        self._pool = pool
        self._steps: dict[int, _RecordedStep] = {}
        self._failure = _why_unrecorded(model)
        try:
            if not self._failure and not self._record(model, record, most_requests):
                self._failure = "recording failed"
                self._steps.clear()
        except BaseException:
            self.drop()
            raise

    def drop(self) -> None:
        """Forget what was recorded, also where an error still holds a step."""
        self._failure = "dropped"
        for step in self._steps.values():
            step.forget()
        self._steps.clear()

    def run(self, rows: Sequence[BatchRow], followed: Followed | None = None, most_rows: int = 0) -> Tensor | None:
        """Final hidden states ``[rows, hidden]``, valid until the next call; None where it cannot be replayed.

        most_rows: of any DP rank. All call this at once, with one answer, and with rows of decode alone.
        """
        num_rows = max(len(rows), most_rows)
        reason = self._failure or self._misfit(rows, num_rows)
        self.counts[reason or REPLAYED] += 1
        if reason:
            return None
        size = min(size for size in self._steps if size >= num_rows)
        return self._steps[size].run(rows, followed)

    def _record(self, model: DecoderModel, record: Record, most_requests: int) -> bool:
        """Whether all ranks could: if one met the others in another way than they do, each would wait."""
        # The largest first, whose memory the others share.
        for size in reversed(batch_sizes(min(most_requests, _most_requests(model)))):
            problem = ""
            try:
                self._steps[size] = _RecordedStep(model, self._pool, size, record)
            except RecordingError as error:
                problem = str(error)
            num_failed = torch.tensor([float(bool(problem))], device=model.device)
            for group in (model.groups.tp, model.groups.dp):
                group.all_reduce(num_failed)
            if num_failed.item():
                _log.warning("decode steps are not replayed: %s", problem or "another rank cannot record them")
                return False
        return True

    def _misfit(self, rows: Sequence[BatchRow], num_rows: int) -> str:
        if any(len(row.token_ids) != 1 or not row.sampled or row.scored for row in rows):
            return "prompt tokens"
        return "" if num_rows <= max(self._steps) else "more requests than recorded"


class _RecordedStep:
    """A step of a fixed number of requests; those that are not there see one token of the trash page."""

    def __init__(self, model: DecoderModel, pool: PagePool, size: int, record: Record) -> None:
        self._pool, self._size = pool, size
        config, device = model.config, model.device
        query = torch.empty(1, config.num_heads, config.head_dim, dtype=model.dtype, device=device)
        # Whatever the pool holds, so that what is recorded over a small one takes as much memory.
        most_pages = pages_for(config.max_position_embeddings, pool.page_size)
        self._attention = DecodeAttention(size, most_pages, pool.page_size, config.num_kv_heads, query, device)
        self._inputs = torch.zeros(4, size, dtype=torch.int64, device=device)
        token_ids, positions, slots, is_request = self._inputs
        dp = model.groups.parallel.dp
        context = _DecodeContext(pool, slots, self._attention, (size,) * dp if dp > 1 else None)

        def compute() -> Tensor:
            if model.config.moe is not None:
                context.counted = is_request[:, None].bool()
            hidden: Tensor = model(token_ids, positions, context)
            return hidden

        self._fill([])
        self._hidden, self._replay = record(compute)

    def forget(self) -> None:
        self._replay = _forgotten

    def run(self, rows: Sequence[BatchRow], followed: Followed | None) -> Tensor:
        self._fill(rows)
        if followed is not None:
            followed.put_into(self._inputs[0])
        self._replay()
        return self._hidden[: len(rows)]

    def _fill(self, rows: Sequence[BatchRow]) -> None:
        pool, num_rows = self._pool, len(rows)
        on_host = torch.zeros(self._inputs.shape, dtype=torch.int64, pin_memory=self._inputs.is_cuda)
        token_ids, positions, slots, is_request = on_host.numpy()
        is_request[:num_rows] = 1
        token_ids[:num_rows] = [row.token_ids[0] for row in rows]
        positions[:num_rows] = [row.prefix_len for row in rows]
        tables = [np.asarray(row.pages, dtype=np.int64) for row in rows]
        tables += [np.array([pool.num_pages])] * (self._size - num_rows)
        pages, places = np.divmod(positions, pool.page_size)
        slots[:] = [table[page] for table, page in zip(tables, pages.tolist(), strict=True)]
        slots *= pool.page_size
        slots += places
        # From where a GPU reads it: the host goes on at once, and torch keeps the memory until then.
        self._inputs.copy_(on_host, non_blocking=True)
        self._attention.fill(positions + 1, tables)


def _forgotten() -> None:
    raise AssertionError("a step that was forgotten is replayed")


def _most_requests(model: DecoderModel) -> int:
    """Of a DP rank, whose tokens come to their experts without counts that the host waits for."""
    moe = model.config.moe
    if moe is None:
        return sys.maxsize
    return max(1, min(FEW_TOKENS, FEW_CHOICES // moe.top_k) // model.groups.parallel.dp)


def _why_unrecorded(model: DecoderModel) -> str:
    """What in the middle of a step goes through the host; empty for nothing."""
    groups = model.groups
    goes_to_experts = groups.moe_block.size > 1 and groups.moe_dispatch is MoeDispatch.ALL_TO_ALL
    return "tokens sent to experts" if model.config.moe is not None and goes_to_experts else ""


class _DecodeContext:
    """The AttentionContext of recorded steps: everything that changes from step to step is in tensors."""

    kv_first = False
    counted: Tensor | None = None
    wanted: Tensor | None = None

    def __init__(self, pool: PagePool, slots: Tensor, attention: DecodeAttention, lens: Lens) -> None:
        self._pool, self._slots, self._attention = pool, slots, attention
        self.lens = self.last_lens = lens

    @property
    def last(self) -> "_DecodeContext":
        """Every token is drawn from."""
        return self

    def place(self, layer: int) -> KvPlace | None:
        """See AttentionContext."""
        return self._pool.place(layer, self._slots)

    def put(self, layer: int, k: Tensor, v: Tensor) -> None:
        """See AttentionContext."""
        self._pool.write(layer, self._slots, torch.stack((k, v), dim=1))

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """See AttentionContext."""
        return self._attention.attend(q, *self._pool.layer_view(layer))
