"""Layers of cached pages that a thread copies into the pool while a step that reads them is computed."""

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # torch stays out of the simulator
    from workers.device import Moment


class LayerArrivals:
    """Of one rank and step. The copying thread tells what has come, the computing thread waits for what it reads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._moments: list[Moment] = []
        """By layer."""
        self._error: Exception | None = None

    def note(self, num_layers: int, moment: "Moment") -> None:
        """So many more layers are there, or will be at that moment."""
        with self._changed:
            self._moments += [moment] * num_layers
            self._changed.notify_all()

    @property
    def num_here(self) -> int:
        """Layers that `wait_for` returns for at once."""
        with self._changed:
            return len(self._moments)

    def fail(self, error: Exception) -> None:
        """Nothing more will come."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def wait_for(self, layer: int) -> None:
        """Until the layer is there for what this thread does, or starts on its GPU, from now on.

        Raises:
            Exception: what the copying thread failed with.
        """
        with self._changed:
            self._changed.wait_for(lambda: len(self._moments) > layer or self._error is not None)
            if self._error is not None:
                raise self._error
            moment = self._moments[layer]
        if moment is not None:
            moment.wait()
