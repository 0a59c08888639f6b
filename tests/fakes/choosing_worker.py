"""Workers whose steps are divided over CP ranks by rates, or in turns, that do not depend on the machine."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count, cycle
from typing import Any
from unittest.mock import patch

from cluster.spec.step_messages import ScheduledRequest
from cluster.spec.strategy import CpMode, Passing, Strategy
from tests.fakes.telling_worker import TellingWorker
from workers.context_parallel.cost_model import Rates
from workers.context_parallel.shard_plan import make_step_shape
from workers.context_parallel.strategy_choice import StrategyChoice, StrategyChooser

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
"""Computing is so slow, and everything else so fast, that two tokens are better computed by two ranks."""

TURNS = (Strategy.ZIGZAG, Strategy.WHOLE_REQUEST, Strategy.INTERLEAVE, Strategy.NONE, Strategy.CONTIGUOUS)

_choose = StrategyChooser.__call__


class WorkerWithCheapExchange(TellingWorker):
    """Its automatic choices follow ``CHEAP_EXCHANGE``, whatever was measured."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        _choose_by(lambda chooser, scheduled: _choose(replace(chooser, rates=CHEAP_EXCHANGE), scheduled))


class WorkerTakingTurns(TellingWorker):
    """Each step of its leader takes the next of ``TURNS``, and in ring mode the other passing."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        strategies, numbers = cycle(TURNS), count()

        def choose(chooser: StrategyChooser, scheduled: Sequence[ScheduledRequest]) -> StrategyChoice:
            is_ring = chooser.mode is CpMode.RING and chooser.cp > 1
            passing = tuple(Passing)[next(numbers) % 2] if is_ring else None
            shape = make_step_shape(scheduled, next(strategies), passing, chooser.cp)
            return StrategyChoice(shape, 1.0, {})  # only estimated steps are counted

        _choose_by(choose)


def _choose_by(choose: Callable[..., StrategyChoice]) -> None:
    """For the rest of this process, which has workers of one class."""
    patch.object(StrategyChooser, "__call__", choose).start()
