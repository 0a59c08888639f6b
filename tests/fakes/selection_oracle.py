"""Attention to selected keys computed in the simplest way, and chunked requests to compare with it.

Scores of keys are small whole numbers, exact in any order of summation, and many of them are equal.
"""

from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from tests.fakes.attention_oracle import (
    GROUPS,
    HEAD_DIM,
    KV_HEADS,
    NUM_LAYERS,
    Array,
    Scenario,
    ScenarioRun,
    StepTokens,
    naive_attention,
)
from tests.fakes.attention_params import params_for
from tests.fakes.kv import kv_pool
from workers.attention.selection import IndexQueries
from workers.engine.step_context import StepContext
from workers.layers.attention import take
from workers.memory.page_pool import PagePool

INDEX_HEADS, INDEX_DIM = 3, 4


@dataclass(frozen=True)
class SelectedScenario(Scenario):
    """Requests whose queries use ``top_k`` keys."""

    top_k: int = 3
    shares: bool = False
    """True if the second layer uses the keys that the first one has selected."""

    def inputs(self, request: int, layer: int) -> tuple[Array, ...]:
        """Return q, k, v, and the queries, weights and keys of the indexer, ``[tokens, heads, dim]`` each."""
        q, k, _ = super().inputs(request, layer)
        random = np.random.default_rng((self.seed, request, layer, 1))
        shapes = (INDEX_HEADS, INDEX_DIM), (INDEX_HEADS, 1), (1, INDEX_DIM)
        index = [random.integers(-2, 3, size=(len(q), *shape)).astype(float) for shape in shapes]
        return q, k[:, :1], k[:, :1, : self.value_dim], *index

    def selected(self, request: int, layer: int) -> list[list[int]]:
        """Return the positions of the keys that each query of a request uses."""
        *_, queries, weights, keys = self.inputs(request, 0 if self.shares else layer)
        chosen = []
        for position, (heads, weight) in enumerate(zip(queries, weights[..., 0], strict=True)):
            scores = [weight @ np.maximum(heads @ key[0], 0.0) for key in keys[: position + 1]]
            ranked = np.argsort(-np.array(scores), kind="stable")
            chosen.append(sorted(ranked[: self.top_k].tolist()))
        return chosen

    def expected(self, request: int, layer: int) -> Array:
        q, k, v, *_ = self.inputs(request, layer)
        rows = [
            naive_attention(q[position : position + 1], k[keys], v[keys])
            for position, keys in enumerate(self.selected(request, layer))
        ]
        return np.concatenate([np.empty((0, KV_HEADS * GROUPS, self.value_dim)), *rows])


class SelectedRun(ScenarioRun):
    """A scenario on one rank. Layers attend to all keys if no query sees more than it may use."""

    scenario: SelectedScenario

    def _make_pool(self, num_pages: int) -> PagePool:
        return kv_pool(
            num_pages,
            1,
            NUM_LAYERS,
            self.scenario.page_size,
            HEAD_DIM,
            self.scenario.dtype,
            device=self.device.torch_device,
            value_dim=INDEX_DIM,
        )

    def _run_layer(self, context: StepContext, tokens: StepTokens, layer: int) -> Tensor:
        scenario = self.scenario
        q, k, _, index_q, weights, index_keys = (self._local(tokens, layer, which) for which in range(6))
        context.put(layer, k, index_keys)
        q, index_q, weights = (take(x, context.query_rows) for x in (q, index_q, weights))
        params = replace(params_for(q), value_dim=scenario.value_dim)
        if context.most_keys <= scenario.top_k:
            return context.attend(layer, q, params)
        index = IndexQueries(index_q, weights[..., 0].float())
        is_shared = scenario.shares and layer > 0
        return context.attend_selected(layer, q, params, None if is_shared else index, scenario.top_k)
