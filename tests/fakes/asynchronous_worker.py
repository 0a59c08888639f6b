"""Worker whose device runs asynchronously, like a GPU."""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from cluster.spec.ids import Role
from cluster.spec.registry import RankRecord
from cluster.spec.step_messages import StepPlan
from workers.memory.layerwise_load import LayerwiseLoad
from workers.memory.page_pool import OnStored
from workers.worker import Worker


class _FutureStep:
    def __init__(self, step: "Future[Any]") -> None:
        self._step = step

    @property
    def requests(self) -> Any:
        return self._step.result().requests

    @property
    def is_over(self) -> bool:
        return self._step.done() and bool(self._step.result().is_over)

    def wait(self) -> Any:
        return self._step.result().wait()


class _AsynchronousRunner:
    """Runner that executes steps on a thread one after another, like a GPU's stream."""

    is_asynchronous = True

    def __init__(self, runner: Any) -> None:
        self.num_following = 0
        self._runner = runner
        self._stream = ThreadPoolExecutor(1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def begin(self, plan: StepPlan, load: LayerwiseLoad | None, on_stored: OnStored | None) -> _FutureStep:
        self.num_following += sum(request.input_from_previous_step for request in plan.scheduled)
        return _FutureStep(self._stream.submit(self._runner.begin, plan, load, on_stored))


class AsynchronousWorker(Worker):
    """Worker whose decode steps are asynchronous. Prefill steps are not."""

    def load(self, store_address: str) -> RankRecord:
        record = super().load(store_address)
        if self.spec.role is Role.DECODE:
            assert self._rank is not None
            runner: Any = _AsynchronousRunner(self._rank.runner)
            self._rank = replace(self._rank, runner=runner)
        return record

    def num_following(self) -> int:
        """Return the number of scheduled requests whose input was not yet read from the previous step."""
        assert self._rank is not None
        runner: Any = self._rank.runner
        return int(runner.num_following)
