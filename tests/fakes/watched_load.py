"""Layerwise load that a test observes."""

from collections.abc import Callable

from workers.device import Event
from workers.memory.layerwise_load import LayerwiseLoad


class WatchedLoad(LayerwiseLoad):
    """Load that calls a function with the number of layers whenever layers are reported."""

    def __init__(self, look: Callable[[int], None]) -> None:
        super().__init__()
        self.num_layers = 0
        self._look = look

    def add(self, num_layers: int, event: Event | None) -> None:
        self.num_layers += num_layers
        self._look(self.num_layers)
        super().add(num_layers, event)
