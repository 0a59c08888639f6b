"""Context parallelism in every mode, with several ranks on one GPU, against the oracle: `pytest -m gpu tests/gpu`."""

from itertools import product

import pytest
import torch

from cluster.spec.strategy import Passing, Strategy
from tests.fakes.attention_oracle import Scenario, ScenarioRun, check_scenario
from tests.fakes.thread_group import on_thread_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]  # a cold cache compiles every kernel


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_mode(cp: int, dtype: torch.dtype) -> None:
    for strategy, passing, in_background in product(Strategy, [None, *Passing], [True, False]):
        chunks = ((50, 3, 0), (4, 0, 70), (1, 60, 1))
        scenario = Scenario(chunks=chunks, strategy=strategy, cp=cp, passing=passing, dtype=dtype)
        results = on_thread_ranks(
            cp, lambda group, of=scenario: ScenarioRun(of, group, device="cuda").run(), in_background=in_background
        )
        check_scenario(scenario, results)
