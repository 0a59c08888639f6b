"""Workers that choose CP strategies by fixed rates or in rotation, independently of the machine."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count, cycle
from typing import Any
from unittest.mock import patch

from cluster.spec.step_messages import ScheduledRequest
from cluster.spec.strategy import CpMode, Passing, Strategy
from tests.fakes.load_reporting_worker import LoadReportingWorker
from workers.context_parallel.cost_model import Rates
from workers.context_parallel.shard_plan import make_step_shape
from workers.context_parallel.strategy_chooser import StrategyChoice, StrategyChooser

CHEAP_EXCHANGE = Rates(
    step_s=0.0,
    linear_flops_per_s=1e6,
    attention_flops_per_s=1e6,
    run_s=1e-9,
    row_s=1e-9,
    merge_row_s=1e-9,
    exchange_s=1e-9,
    exchange_bytes_per_s=1e15,
)
"""Compute is so slow and communication so fast that two tokens are computed faster by two ranks."""

TURNS = (Strategy.ZIGZAG, Strategy.WHOLE_REQUEST, Strategy.INTERLEAVE, Strategy.NONE, Strategy.CONTIGUOUS)

_choose = StrategyChooser.__call__


class WorkerWithCheapExchange(LoadReportingWorker):
    """Worker whose automatic choices use ``CHEAP_EXCHANGE`` instead of measured rates."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        _choose_by(lambda chooser, scheduled: _choose(replace(chooser, rates=CHEAP_EXCHANGE), scheduled))


class WorkerWithRotatingStrategies(LoadReportingWorker):
    """Worker whose steps rotate through ``TURNS``, and in ring mode through both ways of passing."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        strategies, numbers = cycle(TURNS), count()

        def choose(chooser: StrategyChooser, scheduled: Sequence[ScheduledRequest]) -> StrategyChoice:
            is_ring = chooser.mode is CpMode.RING and chooser.cp > 1
            passing = tuple(Passing)[next(numbers) % 2] if is_ring else None
            shape = make_step_shape(scheduled, next(strategies), passing, chooser.cp)
            return StrategyChoice(shape, 1.0)  # only estimated steps are counted

        _choose_by(choose)


def _choose_by(choose: Callable[..., StrategyChoice]) -> None:
    """Use a function for the rest of this process, whose workers have one class."""
    patch.object(StrategyChooser, "__call__", choose).start()
