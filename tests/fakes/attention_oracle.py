"""Attention computed in the simplest way in float64, and chunked requests to compare with it.

The oracle knows nothing of pages, ranks, runs or merging.
"""

import weakref
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster.spec.config import AttentionSetting
from cluster.spec.strategy import Passing, Strategy
from tests.fakes.attention_params import params_for
from tests.fakes.kv import kv_pool, store_kv
from tests.fakes.steps import Request, step_of
from workers.attention.interface import AttentionBackend, Feature
from workers.attention.registry import choose_backend
from workers.context_parallel.exchange import join_rows
from workers.device import CPU, Device
from workers.engine.attention_context import make_context
from workers.engine.batch import StepBatch, build_step_batch
from workers.engine.step_context import CpExchange, StepContext
from workers.layers.attention import take
from workers.memory.page_pool import PagePool
from workers.parallel.communicator import Communicator

Array = NDArray[np.float64]

NUM_LAYERS, KV_HEADS, GROUPS, HEAD_DIM = 2, 2, 2, 8


class Stored(Enum):
    """Content of the KV that a layer stores."""

    KEYS_AND_VALUES = auto()
    KEYS = auto()
    """Keys whose first elements are the values."""
    LATENTS = auto()
    """One row for all heads, which the layer expands to keys and values."""


@dataclass(frozen=True)
class Scenario:
    """Requests in chunks: ``chunks[step][request]`` tokens are computed in a step, none if zero."""

    chunks: tuple[tuple[int, ...], ...]
    strategy: Strategy
    cp: int
    passing: Passing | None = None
    """None if every rank holds all pages. Otherwise each rank holds the pages that it owns."""
    page_size: int = 4
    dtype: torch.dtype = torch.float32
    seed: int = 0
    value_dim: int = HEAD_DIM
    stored: Stored = Stored.KEYS_AND_VALUES

    @property
    def total_lens(self) -> list[int]:
        """Return the final number of tokens in each request."""
        return [sum(lens) for lens in zip(*self.chunks, strict=True)]

    def inputs(self, request: int, layer: int) -> tuple[Array, ...]:
        """Return q, k and v of a request's tokens, ``[tokens, heads, dim]``, exact in bf16."""
        random = np.random.default_rng((self.seed, request, layer))
        shapes = ((KV_HEADS * GROUPS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, self.value_dim))
        length = self.total_lens[request]
        q, k, v = (np.round(random.normal(size=(length, *shape)) * 16) / 16 for shape in shapes)
        return q, k, k[..., : self.value_dim] if self.stored is Stored.KEYS else v

    def parts(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Return what a layer stores of K and V, ``[tokens, heads, dim]``."""
        if self.stored is Stored.LATENTS:
            return (torch.cat((k.flatten(1), v.flatten(1)), dim=-1)[:, None],)
        return (k,) if self.stored is Stored.KEYS else (k, v)

    def expand(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Return K and V of rows ``[tokens, 1, width]``."""
        k, v = latents[:, 0].tensor_split((KV_HEADS * HEAD_DIM,), dim=-1)
        return k.reshape(-1, KV_HEADS, HEAD_DIM), v.reshape(-1, KV_HEADS, self.value_dim)

    def expected(self, request: int, layer: int) -> Array:
        """Return the attention output of all tokens in a request, ``[tokens, heads, dim]``."""
        q, k, v = self.inputs(request, layer)
        return naive_attention(q, k, v)


def naive_attention(q: Array, k: Array, v: Array) -> Array:
    """Compute attention by token and head. Token p attends to tokens 0..p, and q may contain the last tokens only."""
    out = np.empty((*q.shape[:2], v.shape[2]))
    groups, offset = q.shape[1] // k.shape[1], len(k) - len(q)
    for token in range(len(q)):
        for head in range(q.shape[1]):
            keys = k[: offset + token + 1, head // groups]
            scores = np.array([np.dot(q[token, head], key) for key in keys]) / np.sqrt(q.shape[2])
            weights = np.exp(scores - scores.max())
            out[token, head] = sum(w * x for w, x in zip(weights, v[:, head // groups], strict=False)) / weights.sum()
    return out


class StepResult(NamedTuple):
    """Attention outputs that one rank saw in one step."""

    joined: Array
    """``[layers, tokens, heads, dim]``: the outputs of all ranks, in the order of the flattened batch."""
    last: Array
    """Output of the last layer for the last token of each sampled request."""


def page_tables(scenario: Scenario, owners: int) -> tuple[list[NDArray[np.int64]], int]:
    """Return every request's global page numbers, with owners in rotation, and the number of pages per owner."""
    random = np.random.default_rng(scenario.seed)
    counts = [-(-length // scenario.page_size) for length in scenario.total_lens]
    of_pages = [(random.integers(owners) + np.arange(count)) % owners for count in counts]
    pages_an_owner = sum(-(-count // owners) for count in counts)
    free = [list(random.permutation(pages_an_owner)) for _ in range(owners)]
    tables = [np.array([free[owner].pop() * owners + owner for owner in part], dtype=np.int64) for part in of_pages]
    return tables, pages_an_owner


class ScenarioRun:
    """A scenario on one rank, with a pool whose unwritten slots are NaN."""

    def __init__(
        self, scenario: Scenario, group: Communicator, backend: AttentionBackend | None = None, device: Device = CPU
    ) -> None:
        self.scenario = scenario
        self.device = device
        self.exchange = CpExchange(group)
        self.backend = (
            backend or choose_backend(AttentionSetting.AUTO, self.device, scenario.dtype, {Feature.WINDOW}).backend
        )
        self.owners = 1 if scenario.passing is None else scenario.cp
        self.tables, pages_an_owner = page_tables(scenario, self.owners)
        self.pool = self._make_pool(pages_an_owner)
        for view in chain.from_iterable(map(self.pool.layer_view, range(NUM_LAYERS))):
            view.fill_(torch.nan)
        self.inputs = [
            [scenario.inputs(request, layer) for layer in range(NUM_LAYERS)] for request in range(len(self.tables))
        ]
        self.done = [0] * len(self.tables)

    def _make_pool(self, num_pages: int) -> PagePool:
        scenario = self.scenario
        num_heads, dim, is_latent = KV_HEADS, HEAD_DIM, scenario.stored is Stored.LATENTS
        if is_latent:
            num_heads, dim = 1, KV_HEADS * (HEAD_DIM + scenario.value_dim)
        return kv_pool(
            num_pages,
            num_heads,
            NUM_LAYERS,
            scenario.page_size,
            dim,
            scenario.dtype,
            device=self.device.torch_device,
            value_dim=scenario.value_dim,
            is_latent=is_latent or scenario.stored is Stored.KEYS,
        )

    def run(self) -> list[StepResult]:
        """Run all steps. Every second request in a step is sampled."""
        return [self._step(lens) for lens in self.scenario.chunks]

    def _step(self, lens: tuple[int, ...]) -> StepResult:
        present = [request for request, length in enumerate(lens) if length]
        batch = self._batch(lens, present)
        context = make_context(batch, self.pool, self.backend, self.exchange)
        tokens = StepTokens(batch, lens, present)
        outs = [self._run_layer(context, tokens, layer) for layer in range(NUM_LAYERS)]
        joined = torch.stack([join_rows(self.exchange.group, batch.shards, out) for out in outs])
        # Compute the last layer again like a model, with the queries of the sampled tokens alone.
        last_out = self._run_layer(context.last_layer, tokens, NUM_LAYERS - 1)
        last = context.last_layer.gather_sampled(last_out.flatten(1))
        for request in present:
            self.done[request] += lens[request]
        contexts = [weakref.ref(context), weakref.ref(context.last_layer)]
        del context
        assert [ref() for ref in contexts if ref()] == [], "a step's tensors wait for the garbage collector"
        return StepResult(*(x.cpu().double().numpy() for x in (joined, last)))

    def _run_layer(self, context: StepContext, tokens: "StepTokens", layer: int) -> Tensor:
        q, k, v = (self._local(tokens, layer, which) for which in range(3))
        slots = None if context.kv_first else context.kv_slots(layer)
        if slots is None:
            context.put(layer, *self.scenario.parts(k, v))
        else:
            store_kv(*slots, torch.stack((k, v), dim=1))
        return self._attend(context, layer, take(q, context.query_rows))

    def _attend(self, context: StepContext, layer: int, q: Tensor) -> Tensor:
        stored, params = self.scenario.stored, params_for(q)
        if stored is not Stored.KEYS_AND_VALUES:
            params = replace(params, value_dim=self.scenario.value_dim)
        return context.attend(layer, q, params, self.scenario.expand if stored is Stored.LATENTS else None)

    def _batch(self, lens: tuple[int, ...], present: list[int]) -> StepBatch:
        requests = [
            Request(range(lens[r]), self.done[r], self.tables[r], samples=number % 2 == 0)
            for number, r in enumerate(present)
        ]
        return build_step_batch(
            step_of(requests, self.scenario.strategy, self.scenario.cp, self.scenario.passing),
            cp=self.scenario.cp,
            cp_rank=self.exchange.group.rank,
            page_size=self.scenario.page_size,
            null_slot=self.pool.null_slot,
            device=self.device,
            owners=self.owners,
        )

    def _local(self, tokens: "StepTokens", layer: int, which: int) -> Tensor:
        """Return an input of this rank's tokens."""
        parts = [self.inputs[r][layer][which][self.done[r] : self.done[r] + tokens.lens[r]] for r in tokens.present]
        flattened = np.concatenate([self.inputs[0][layer][which][:0], *parts])
        local = torch.from_numpy(flattened[tokens.batch.shards.local(tokens.batch.cp_rank)])
        return local.to(self.device.torch_device, self.scenario.dtype)


class StepTokens(NamedTuple):
    """Tokens of one step."""

    batch: StepBatch
    lens: tuple[int, ...]
    present: list[int]
    """Requests that have tokens."""


def check_scenario(scenario: Scenario, results: list[list[StepResult]]) -> None:
    """Compare the oracle with the results of every rank (outer list) in every step."""
    tolerance = 1e-5 if scenario.dtype == torch.float32 else 0.03
    expected = [
        [scenario.expected(request, layer) for layer in range(NUM_LAYERS)]
        for request in range(len(scenario.total_lens))
    ]
    nothing = np.empty((0, KV_HEADS * GROUPS, scenario.value_dim))
    done = [0] * len(expected)
    for step, lens in enumerate(scenario.chunks):
        present = [request for request, length in enumerate(lens) if length]
        joined = [
            np.concatenate([nothing, *(expected[r][layer][done[r] : done[r] + lens[r]] for r in present)])
            for layer in range(NUM_LAYERS)
        ]
        last = [expected[r][-1][done[r] + lens[r] - 1] for r in present[::2]]
        for rank_results in results:
            np.testing.assert_allclose(rank_results[step].joined, np.stack(joined), atol=tolerance)
            np.testing.assert_allclose(
                rank_results[step].last,
                np.array(last).reshape(len(last), KV_HEADS * GROUPS * scenario.value_dim),
                atol=tolerance,
            )
        done = [have + length for have, length in zip(done, lens, strict=True)]
