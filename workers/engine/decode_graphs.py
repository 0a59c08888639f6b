"""Decode steps that are captured for some batch sizes and replayed with almost no time in Python."""

import logging
import sys
from collections import Counter

import numpy as np
import torch
from torch import Tensor

from cluster.spec.decode_graphs import batch_sizes
from cluster.spec.kv import pages_for
from cluster.spec.step_messages import StepShape
from workers.attention.interface import AttentionBackend, AttentionParams, GraphAttention, GraphShape
from workers.attention.merge import with_sinks
from workers.attention.selection import IndexQueries
from workers.engine.batch import StepInput
from workers.engine.captures import Capture, CaptureError
from workers.expert_parallel.dispatch_cost import FEW_TOKENS
from workers.kernels.elementwise import KvSlots
from workers.layers.attention import AttentionContext, Expand
from workers.layers.feed_forward import Experts
from workers.memory.page_pool import PagePool
from workers.models.decoder import DecoderModel
from workers.parallel.exchanges import Lens

REPLAYED = "replayed"

_MOST_ON_CPU = 16
"""Maximum number of requests of a step that a CPU captures. Python takes little of the time of larger ones."""

_log = logging.getLogger(__name__)


class DecodeGraphs:
    """Captured decode steps, in which each request has one token. Other steps are not replayed."""

    def __init__(
        self, model: DecoderModel, pool: PagePool, backend: AttentionBackend, most_requests: int, capture: Capture
    ) -> None:
        self.counts: Counter[str] = Counter()
        """Number of replayed steps and, by reason, of all other steps."""
        self._model, self._pool, self._backend = model, pool, backend
        self._steps: dict[int, _CapturedStep] = {}
        self.why_none = self._why_not()
        """Reason why no step is captured. Empty if some are."""
        try:
            if not self.why_none and not self._capture(capture, most_requests):
                self.why_none = "capture failed"
                self._steps.clear()
        except BaseException:
            self.drop()
            raise

    def drop(self) -> None:
        self.why_none = "dropped"
        for step in self._steps.values():
            del step.replay  # An error's traceback may still refer to the step.
        self._steps.clear()

    def run(self, step: StepInput) -> Tensor | None:
        """Return final hidden states ``[requests, hidden]``, valid until the next call. None if the step is not
        captured.

        All DP ranks call this together and choose alike, since ``step.shape`` describes the step on all of them.
        """
        num_requests = max(step.shape.shard_lens)
        reason = self.why_none
        if not reason and not step.shape.is_decode:
            reason = "prompt tokens"
        elif not reason and num_requests > max(self._steps):
            reason = "more requests than captured"
        self.counts[reason or REPLAYED] += 1
        if reason:
            return None
        size = min(size for size in self._steps if size >= num_requests)
        return self._steps[size].run(step)

    def _why_not(self) -> str:
        """Return why no step can be captured. Empty if steps can be captured."""
        if not self._attention(1):
            return "attention cannot be captured"
        return "" if _most_requests(self._model) else "experts one after another"

    def _attention(self, num_requests: int) -> GraphAttention | None:
        model, pool = self._model, self._pool
        shape = GraphShape(
            num_requests=num_requests,
            # The model's maximum, so that a capture over a small pool takes as much memory as one over the final pool.
            most_pages=pages_for(model.config.max_position_embeddings, pool.page_size),
            page_size=pool.page_size,
            num_heads=model.attention.num_heads,
            num_kv_heads=pool.row_shape(0)[0],
            head_dim=model.attention.query_dim,
            value_dim=model.attention.value_dim,
            dtype=model.dtype,
            device=model.device,
        )
        return self._backend.prepare_graph(shape)

    def _capture(self, capture: Capture, most_requests: int) -> bool:
        """Capture the steps. Return whether all ranks succeeded: a rank that replays a step and a rank that computes it
        would wait for each other forever.
        """
        model = self._model
        # Capture the largest step first, since the others reuse its memory.
        most = min(most_requests, _most_requests(model))
        # A CPU computes padding, too, so it captures steps of every size.
        sizes = batch_sizes(most) if model.device.has_own_memory else range(1, min(most, _MOST_ON_CPU) + 1)
        for size in reversed(sizes):
            problem = ""
            try:
                attention = self._attention(size)
                assert attention is not None, "the backend cannot capture all sizes"
                self._steps[size] = _CapturedStep(model, self._pool, size, attention, capture)
            except CaptureError as error:
                problem = str(error)
            num_failed = torch.tensor([float(bool(problem))], device=model.device.torch_device)
            for group in (model.groups.tp, model.groups.dp):
                group.all_reduce(num_failed)
            if num_failed.item():
                _log.warning("capturing decode steps failed: %s", problem or "another rank cannot capture them")
                return False
        return True


class _CapturedStep:
    """Captured step for ``size`` requests. Fewer requests are padded with single tokens in the null page."""

    def __init__(
        self, model: DecoderModel, pool: PagePool, size: int, attention: GraphAttention, capture: Capture
    ) -> None:
        self._pool, self._size, self._attention = pool, size, attention
        self._device = model.device
        self._inputs = torch.zeros(4, size, dtype=torch.int64, device=model.device.torch_device)
        token_ids, positions, slots, is_request = self._inputs
        dp = model.groups.parallel.dp
        most_keys = model.config.max_position_embeddings
        context = _DecodeContext(pool, slots, self._attention, most_keys, (size,) * dp if dp > 1 else None)

        def compute() -> Tensor:
            if model.config.experts_per_token:
                context.counted = is_request[:, None].bool()
            hidden: Tensor = model(token_ids, positions, context)
            return hidden

        self._fill(StepInput([], [[]], StepShape()))
        self._hidden, self.replay = capture(compute)

    def run(self, step: StepInput) -> Tensor:
        self._fill(step)
        if step.previous is not None:
            step.previous.put_into(self._inputs[0])
        self.replay()
        return self._hidden[: len(step.scheduled)]

    def _fill(self, step: StepInput) -> None:
        page_size, num_requests = self._pool.page_size, len(step.scheduled)
        on_host = self._inputs
        if self._device.is_asynchronous:
            on_host = torch.empty(self._inputs.shape, dtype=torch.int64, pin_memory=True)
        (page_tables,) = step.page_tables  # With several lifetimes, there are windows, and no step is captured.
        padding = [0] * (self._size - num_requests)
        token_ids = [request.token_ids[0] for request in step.scheduled] + padding
        positions = [request.first_position for request in step.scheduled] + padding
        tables = [*page_tables, *[np.array([self._pool.num_pages])] * len(padding)]
        slots = [
            int(table[position // page_size]) * page_size + position % page_size
            for table, position in zip(tables, positions, strict=True)
        ]
        # Each of numpy's calls takes long after a step that has read all weights, so there is only one.
        on_host.numpy()[:] = token_ids, positions, slots, [1] * num_requests + padding
        if on_host is not self._inputs:
            # The copy is asynchronous. Torch keeps the pinned memory until it is done.
            self._inputs.copy_(on_host, non_blocking=True)
        self._attention.fill([position + 1 for position in positions], tables)


def _most_requests(model: DecoderModel) -> int:
    """Return the maximum number of requests per DP rank for which the host need not know experts' numbers of tokens."""
    per_token, dp = model.config.experts_per_token, model.groups.parallel.dp
    if not per_token:
        return sys.maxsize
    choices = min(module.most_uncounted for module in model.modules() if isinstance(module, Experts))
    return min(FEW_TOKENS, choices // per_token) // dp


class _DecodeContext(AttentionContext):
    """Context of captured steps. Everything that differs between steps is in tensors."""

    def __init__(self, pool: PagePool, slots: Tensor, attention: GraphAttention, most_keys: int, lens: Lens) -> None:
        self._pool, self._slots, self._attention, self._most_keys = pool, slots, attention, most_keys
        self.lens = self.last_layer_lens = lens
        self._selection: Tensor | None = None

    @property
    def most_keys(self) -> int:
        return self._most_keys

    def kv_slots(self, layer: int) -> KvSlots | None:
        return self._pool.kv_slots(layer, self._slots)

    def put(self, layer: int, *parts: Tensor) -> None:
        self._pool.write(layer, self._slots, torch.cat(parts, dim=-1))

    def attend(self, layer: int, q: Tensor, params: AttentionParams, expand: Expand | None = None) -> Tensor:
        assert expand is None, "captured steps attend to keys as stored"
        kv = params.key_and_value(self._pool.layer_view(layer))
        return with_sinks(self._attention.attend(q, *kv, params), params.sinks).out

    def attend_selected(
        self, layer: int, q: Tensor, params: AttentionParams, index: IndexQueries | None, top_k: int
    ) -> Tensor:
        parts = self._pool.layer_view(layer)
        if index is not None:
            self._selection = self._attention.best_keys(index, parts[-1], top_k)
        assert self._selection is not None, "a layer before has an indexer"
        return self._attention.attend_selected(q, parts[0], self._selection, params).out
