"""Arrivals of layers that are looked at as they are told."""

from collections.abc import Callable

from workers.cache.layer_arrivals import LayerArrivals

from workers.device import Moment


class WatchedArrivals(LayerArrivals):
    """Looks at the pages whenever something is said to have come."""

    def __init__(self, look: Callable[[int], None]) -> None:
        super().__init__()
        self.num_layers = 0
        self._look = look

    def note(self, num_layers: int, moment: Moment) -> None:
        self.num_layers += num_layers
        self._look(self.num_layers)
        super().note(num_layers, moment)
