"""Times of a traced step, of its layers (through hooks added for that step) and of its collectives."""

import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from cluster.spec.clock import Interval
from cluster.spec.step_messages import StepPlan
from workers.models.decoder import DecoderLayer, DecoderModel
from workers.parallel.communicator import Communicator
from workers.trace.recorder import COLLECTIVES, COMPUTE, Recorder


class StepRecorder:
    """Recorder of one rank. On a GPU, every layer of a traced step waits for the device, so that the recorded times are
    computation times.
    """

    def __init__(self, model: DecoderModel, others: Iterable[Communicator]) -> None:
        """Create the recorder of a model. ``others`` are groups that its layers do not use."""
        self.recorder = Recorder()
        self._parts = list(_named_parts(model))
        self._groups = (*others, *model.groups.all)
        self._device = model.device

    @property
    def communication_s(self) -> float:
        """Time that this rank has spent in collectives so far, traced or not."""
        return sum(group.waited_s for group in self._groups)

    @contextmanager
    def step(self, plan: StepPlan) -> Generator[None]:
        """Return a context that records the computation of a step for which ``recorder.begin`` returned True."""
        start_s = time.monotonic()
        try:
            with ExitStack() as hooks:
                for name, module in self._parts:
                    self._add_hooks(hooks, name, module)
                for group in self._groups:
                    group.observe = self._note_collective
                    hooks.callback(setattr, group, "observe", None)
                yield
        finally:
            self._note(f"step {plan.step}", start_s, _facts(plan))
            self.recorder.end()

    def _add_hooks(self, hooks: ExitStack, name: str, module: nn.Module) -> None:
        starts_s: list[float] = []

        def before(*_: object) -> None:
            starts_s.append(self._now_s())

        def after(*_: object) -> None:
            self._note(name, starts_s.pop())

        hooks.callback(module.register_forward_pre_hook(before).remove)
        hooks.callback(module.register_forward_hook(after).remove)

    def _note(self, name: str, start_s: float, facts: dict[str, int | float | str] | None = None) -> None:
        self.recorder.note(Interval(COMPUTE, name, start_s, self._now_s(), facts or {}))

    def _note_collective(self, call: str, start_s: float, end_s: float) -> None:
        self.recorder.note(Interval(COLLECTIVES, call, start_s, end_s))

    def _now_s(self) -> float:
        self._device.synchronize()
        return time.monotonic()


def _named_parts(model: DecoderModel) -> Iterator[tuple[str, nn.Module]]:
    for number, layer in model.layers.items():
        assert isinstance(layer, DecoderLayer)
        yield from ((f"layer {number}", layer), ("attention", layer.self_attn), ("mlp", layer.mlp))


def _facts(plan: StepPlan) -> dict[str, int | float | str]:
    return {
        "requests": len(plan.scheduled),
        "tokens": sum(len(request.token_ids) for request in plan.scheduled),
        "tokens before": sum(request.first_position for request in plan.scheduled),
        "strategy": plan.shape.strategy.value,
        **({"passing": plan.shape.passing.value} if plan.shape.passing else {}),
    }
