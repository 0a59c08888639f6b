"""What Ctrl-C, SIGTERM and SIGHUP mean to `baton up`, from its first stage to its last. No handler but one raises."""

import queue
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """Handlers that only note the signal: an exception raised anywhere may leave a lock held for good."""

    def __init__(self, report: Callable[[str], None]) -> None:
        """Put the handlers; ``report`` is told the name of an early signal, in a thread."""
        # A SimpleQueue may be filled from a signal handler.
        self._noted: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._receiver: Callable[[str], None] = self._noted.put
        self._report = report
        self._is_noted = False
        threading.Thread(target=self._tell_first, name="signals", daemon=True).start()
        self._install()

    def check(self) -> None:
        """Raise KeyboardInterrupt if there was a signal: here it harms nothing."""
        self._install()
        if self._is_noted:
            raise KeyboardInterrupt

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Raise KeyboardInterrupt at once: for what may take minutes and leaves nothing behind, like a download."""
        self.check()
        receiver, self._receiver = self._receiver, _interrupt
        try:
            yield
        finally:
            self._receiver = receiver

    def pass_on(self, receiver: Callable[[str], None]) -> None:
        """From now on tell somebody else, who must expect to be called between any two steps of the main thread."""
        self._receiver = receiver
        self.check()

    def _install(self) -> None:
        """More than once: Ray puts a handler before ours that prints where it was."""
        for number in _SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores it for us
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _: object) -> None:
        self._is_noted = True
        self._receiver(signal.Signals(number).name)

    def _tell_first(self) -> None:
        self._report(self._noted.get())


def _interrupt(_: str) -> None:
    raise KeyboardInterrupt
