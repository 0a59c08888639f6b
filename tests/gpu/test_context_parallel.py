"""Context parallelism in every mode, with several ranks on one GPU, against the oracle: `pytest -m gpu tests/gpu`."""

from functools import partial
from itertools import product

import pytest
import torch

from cluster.spec.strategy import Passing, Strategy
from tests.fakes.attention_oracle import Scenario, ScenarioRun, StepResult, check_scenario
from tests.fakes.gloo_ranks import on_gloo_ranks
from tests.fakes.selection_oracle import SelectedRun, SelectedScenario
from tests.fakes.thread_group import on_thread_ranks
from workers.device import GPU
from workers.parallel.communicator import Communicator

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]  # a cold cache compiles every kernel

CHUNKS = ((50, 3, 0), (4, 0, 70), (1, 60, 1))


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_mode(cp: int, dtype: torch.dtype) -> None:
    for strategy, passing, in_background in product(Strategy, [None, *Passing], [True, False]):
        scenario = Scenario(chunks=CHUNKS, strategy=strategy, cp=cp, passing=passing, dtype=dtype)
        results = on_thread_ranks(cp, partial(_run, scenario), in_background=in_background)
        check_scenario(scenario, results)


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_selected_keys(cp: int, dtype: torch.dtype) -> None:
    for strategy, passing, shares in product(Strategy, [None, *Passing], [True, False]):
        scenario = SelectedScenario(CHUNKS, strategy, cp, passing, dtype=dtype, top_k=5, shares=shares)
        check_scenario(scenario, on_thread_ranks(cp, partial(_select, scenario), in_background=True))


@pytest.mark.parametrize("cp", [2, 4])
def test_ranks_that_meet_over_tcp(cp: int) -> None:
    """Exchanged tensors are copied through the host."""
    for strategy, passing in product(Strategy, [None, *Passing]):
        scenario = Scenario(chunks=CHUNKS, strategy=strategy, cp=cp, passing=passing, dtype=torch.bfloat16)
        check_scenario(scenario, on_gloo_ranks(cp, partial(_run, scenario), GPU))


def _select(scenario: SelectedScenario, group: Communicator) -> list[StepResult]:
    return SelectedRun(scenario, group, device=GPU).run()


def _run(scenario: Scenario, group: Communicator) -> list[StepResult]:
    return ScenarioRun(scenario, group, device=GPU).run()
