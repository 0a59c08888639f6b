"""Simulated process: it listens, sends, waits, pauses, and dies."""

from abc import ABC, abstractmethod
from functools import partial

from cluster.simulator.surroundings import Surroundings
from cluster.simulator.timeline import Event
from cluster.spec.messages import Message


class Process(ABC):
    """Process with an address."""

    def __init__(self, around: Surroundings, address: str) -> None:
        self.around = around
        self.address = address
        self.is_dead = False
        self._is_paused = False
        self._waiting: list[Event] = []
        """Events postponed until it runs again."""
        around.network.listen(address, self.take)

    @abstractmethod
    def take(self, message: Message) -> None:
        """Handle an arrived message."""

    def send(self, address: str, message: Message) -> None:
        self.around.network.send(self.address, address, message)

    def when_running(self, event: Event) -> None:
        """Run an event now, or when the process is no longer paused; never if it is dead."""
        if self._is_paused:
            self._waiting.append(event)
        elif not self.is_dead:
            event()

    def after(self, delay_s: float, event: Event) -> None:
        """Schedule an event of the process."""
        self.around.after(delay_s, partial(self.when_running, event))

    def every(self, interval_s: float, event: Event) -> None:
        """Repeat an event of the process."""
        self.when_running(event)
        if not self.is_dead:
            self.around.after(interval_s, partial(self.every, interval_s, event))

    def pause(self) -> None:
        self._is_paused = True

    def resume(self) -> None:
        """Run the postponed events and continue."""
        self._is_paused = False
        waiting, self._waiting = self._waiting, []
        for event in waiting:
            self.when_running(event)

    def kill(self) -> None:
        """Die: no scheduled event runs."""
        self.around.trace.add(self.address, "dies")
        self.is_dead = True
        self.around.network.unlisten(self.address)
        self.around.network.end_sender(self.address)
