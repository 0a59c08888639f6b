"""Overlap of communication and compute, observed in the order of events, since results do not depend on it."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from cluster.spec.strategy import Passing, Strategy
from tests.fakes.attention_params import params_for
from tests.fakes.kv import kv_pool
from tests.fakes.steps import Request, step_of
from tests.fakes.thread_group import CompletedWork
from workers.attention.interface import AttentionBackend, AttentionParams, GraphShape, RowAttention, StepAttention
from workers.attention.merge import Partial
from workers.attention.runs import Run
from workers.attention.torch_backend import TorchAttention
from workers.attention.torch_selection import TorchSelection
from workers.device import CPU
from workers.engine.attention_context import make_context
from workers.engine.batch import build_step_batch
from workers.engine.step_context import CpExchange, StepContext
from workers.layers.attention import Attention
from workers.layers.attention_config import AttentionConfig
from workers.layers.projections import Projections
from workers.layers.rotary import RotaryEmbedding
from workers.models.registry import parse_model_config
from workers.parallel.communicator import Communicator

HEADS, DIM, PAGE_SIZE, PREFIX_LEN, NEW_LEN = 2, 8, 4, 8, 12


class Awaited(CompletedWork):
    def __init__(self, events: list[str]) -> None:
        self._events = events

    def wait(self) -> bool:
        self._events.append("arrived")
        return True


class SilentPeers:
    """Group whose other members send nothing. It records started and awaited transfers."""

    def __init__(self, events: list[str], *, in_background: bool) -> None:
        self._events, self.in_background = events, in_background

    def all_gather(self, output: Tensor, tensor: Tensor, /) -> CompletedWork:  # noqa: ARG002
        return self._begin()

    def shift(self, output: Tensor, tensor: Tensor, distance: int, /) -> CompletedWork:  # noqa: ARG002
        return self._begin()

    def open_all_gather(self, num_bytes: int, /) -> None: ...

    def all_reduce(self, tensor: Tensor, /) -> CompletedWork:
        raise AssertionError(tensor.shape)

    def broadcast(self, tensor: Tensor, root: int, /) -> CompletedWork:
        raise AssertionError((tensor.shape, root))

    def barrier(self) -> CompletedWork:
        raise AssertionError

    def leave(self) -> None: ...

    def _begin(self) -> CompletedWork:
        self._events.append("sent")
        return Awaited(self._events)


Attend = Callable[[Tensor, Tensor, Tensor, AttentionParams], Partial]


class NotedAttention(TorchSelection):
    """Backend that records the attended keys."""

    def __init__(self, events: list[str]) -> None:
        self._events, self._backend = events, TorchAttention()

    def prepare_graph(self, shape: GraphShape) -> None: ...

    def prepare(
        self,
        runs: Sequence[Run],
        page_tables: Sequence[Tensor],
        page_size: int,
        key_lens: Sequence[int] | None = None,
    ) -> StepAttention:
        return self._noted("pages", self._backend.prepare(runs, page_tables, page_size, key_lens).attend)

    def prepare_rows(self, query_runs: Sequence[Run], key_runs: Sequence[Run]) -> RowAttention:
        return self._noted("rows", self._backend.prepare_rows(query_runs, key_runs).attend)

    def _noted(self, what: str, attend: Attend) -> "Noted":
        return Noted(lambda: self._events.append(what), attend)


class Noted:
    def __init__(self, note: Callable[[], None], attend: Attend) -> None:
        self._note, self._attend = note, attend

    def attend(self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, /) -> Partial:
        self._note()
        return self._attend(query, key, value, params)


def context_of(
    events: list[str], cp: int, passing: Passing | None = None, *, in_background: bool = True
) -> StepContext:
    """Return the context of the last rank, whose queries see keys of all other ranks."""
    num_pages = (PREFIX_LEN + NEW_LEN) // PAGE_SIZE
    pool = kv_pool(cp * num_pages, HEADS, 1, PAGE_SIZE, DIM, torch.float32)
    batch = build_step_batch(
        step_of([Request(range(NEW_LEN), PREFIX_LEN, range(num_pages))], Strategy.CONTIGUOUS, cp, passing),
        cp=cp,
        cp_rank=cp - 1,
        page_size=PAGE_SIZE,
        null_slot=pool.null_slot,
        device=CPU,
        owners=1 if passing is None else cp,
    )
    group = Communicator("silent", cp - 1, cp, SilentPeers(events, in_background=in_background))
    backend: AttentionBackend = NotedAttention(events)
    return make_context(batch, pool, backend, CpExchange(group))


def one_layer(context: StepContext) -> None:
    q, k, v = torch.randn(3, len(context.batch.token_ids), HEADS, DIM)
    context.put(0, k, v)
    context.attend(0, q, params_for(q))


def test_gather_attends_prefix_and_own_rows_before_it_waits() -> None:
    events: list[str] = []
    one_layer(context_of(events, 2))
    assert events == ["sent", "pages", "rows", "arrived", "rows"]


def test_synchronous_transfers_are_fetched_first_and_attended_in_one_call() -> None:
    events: list[str] = []
    one_layer(context_of(events, 2, in_background=False))
    assert events == ["sent", "arrived", "pages"]


def test_a_ring_passes_each_block_on_before_it_attends_it() -> None:
    events: list[str] = []
    one_layer(context_of(events, 3, Passing.PASS_KV))
    assert events == ["sent", "rows", "arrived", "sent", "rows", "arrived", "rows"]


@pytest.mark.parametrize("in_background", [True, False])
def test_queries_are_projected_while_keys_and_values_travel_by_themselves(
    monkeypatch: pytest.MonkeyPatch, in_background: bool
) -> None:
    events: list[str] = []
    context = context_of(events, 2, in_background=in_background)
    num_tokens = len(context.batch.token_ids)
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 1,
        "hidden_size": HEADS * DIM,
        "intermediate_size": 8,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "vocab_size": 8,
        "max_position_embeddings": 64,
    }
    config = parse_model_config(raw)
    assert isinstance(config.attention, AttentionConfig)
    attention = Attention(
        config.hidden_size, config.attention, config.rms_norm_eps, 0, Communicator("tp"), Projections()
    )
    rotation = RotaryEmbedding(config.rope, DIM, torch.device("cpu"))(torch.arange(num_tokens), torch.float32)
    project = attention.qkv.project

    def noted(x: Tensor, outputs: slice) -> Tensor:
        events.append("queries" if outputs.start is None else "keys and values")
        return project(x, outputs)

    monkeypatch.setattr(attention.qkv, "project", noted)
    with torch.no_grad():
        attention(torch.zeros(num_tokens, HEADS * DIM), rotation, context)
    first = ["keys and values", "sent", "queries"] if in_background else ["sent", "arrived"]
    assert events[: len(first)] == first
