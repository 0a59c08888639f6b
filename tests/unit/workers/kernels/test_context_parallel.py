"""Context parallelism in every mode with the Triton backend, compared with the oracle. Ranks are threads."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.spec.strategy import Passing, Strategy
from tests.fakes.attention_oracle import Scenario, ScenarioRun, check_scenario
from tests.fakes.pairwise import all_pairs
from tests.fakes.selection_oracle import SelectedRun, SelectedScenario
from tests.fakes.thread_group import on_thread_ranks
from workers.attention.interface import AttentionParams
from workers.attention.merge import Partial
from workers.attention.runs import Run
from workers.attention.selection import Chosen
from workers.attention.triton.backend import TritonAttention
from workers.attention.triton.selection import SelectionStep

_alone = threading.Lock()
"""Lock for the interpreter, which runs one kernel at a time."""

CASES = all_pairs(
    {
        "strategy": list(Strategy),
        "cp": [2, 3],
        "passing": [None, *Passing],
        "in_background": [True, False],
        "dtype": [torch.float32, torch.bfloat16],
    }
)


class OneAtATime(TritonAttention):
    """Triton backend for ranks that are threads."""

    def prepare_selection(self, *args: Any) -> SelectionStep:
        return _LockedSelection(super().prepare_selection(*args))  # type: ignore[return-value]

    def prepare(
        self,
        runs: Sequence[Run],
        page_tables: Sequence[Tensor],
        page_size: int,
        key_lens: Sequence[int] | None = None,
    ) -> "_Locked":
        return _Locked(super().prepare(runs, page_tables, page_size, key_lens))

    def prepare_rows(self, query_runs: Sequence[Run], key_runs: Sequence[Run]) -> "_Locked":
        return _Locked(super().prepare_rows(query_runs, key_runs))


class _LockedSelection:
    def __init__(self, step: Any) -> None:
        self._step, self.batches = step, step.batches

    def best_keys(self, *args: Any) -> Chosen:
        with _alone:
            found: Chosen = self._step.best_keys(*args)
        return found

    def attend(self, *args: Any) -> Partial:
        with _alone:
            found: Partial = self._step.attend(*args)
        return found


class _Locked:
    def __init__(self, attention: Any) -> None:
        self._attention = attention

    def attend(self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams, /) -> Partial:
        with _alone:
            found: Partial = self._attention.attend(query, key, value, params)
        return found


def check(strategy: Strategy, cp: int, passing: Passing | None, in_background: bool, dtype: torch.dtype) -> None:
    chunks = ((5, 3), (4, 0), (1, 6))
    scenario = Scenario(chunks=chunks, strategy=strategy, cp=cp, passing=passing, dtype=dtype)
    results = on_thread_ranks(
        cp, lambda group: ScenarioRun(scenario, group, OneAtATime()).run(), in_background=in_background
    )
    check_scenario(scenario, results)


@pytest.mark.parametrize("passing", [None, Passing.PASS_KV], ids=["gather", "ring"])
def test_zigzag(passing: Passing | None) -> None:
    check(Strategy.ZIGZAG, 2, passing, in_background=True, dtype=torch.float32)


@pytest.mark.parametrize("passing", [None, Passing.PASS_Q], ids=["gather", "ring"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_selected_keys(passing: Passing | None, dtype: torch.dtype) -> None:
    chunks = ((5, 3), (4, 0), (1, 6))
    scenario = SelectedScenario(chunks, Strategy.INTERLEAVE, 2, passing, dtype=dtype, top_k=3, shares=True)
    results = on_thread_ranks(2, lambda group: SelectedRun(scenario, group, OneAtATime()).run(), in_background=True)
    check_scenario(scenario, results)


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(value) for value in case.values()))
def test_every_mode(case: dict[str, Any]) -> None:
    check(**case)
