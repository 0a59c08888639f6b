"""Layerwise load of cached pages into the pool, by a thread that runs while a step reads the pages."""

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the simulator has no torch
    from workers.device import Event


class LayerwiseLoad:
    """Progress of one load. The copying thread reports layers; the computing thread waits for them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._events: list[Event | None] = []
        """Events by layer of the rank's stage."""
        self._error: Exception | None = None

    def add(self, num_layers: int, event: "Event | None") -> None:
        """Report the next layers, which are loaded once the event completes."""
        with self._changed:
            self._events += [event] * num_layers
            self._changed.notify_all()

    @property
    def num_here(self) -> int:
        """Return the number of layers reported so far."""
        with self._changed:
            return len(self._events)

    def fail(self, error: Exception) -> None:
        """Report that the load has failed."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def wait_for(self, layer: int) -> None:
        """Wait for a layer. On a GPU, also make the work that this thread starts from now on wait for the layer.

        Raises:
            Exception: the error of a failed load.
        """
        with self._changed:
            self._changed.wait_for(lambda: len(self._events) > layer or self._error is not None)
            if self._error is not None:
                raise self._error
            event = self._events[layer]
        if event is not None:
            event.wait()
