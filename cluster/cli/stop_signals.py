"""Effect of Ctrl-C, SIGTERM and SIGHUP on `baton up`, from its first stage to its last. Only one handler raises."""

import queue
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """Handlers that only record the signal: an exception raised anywhere may leave a lock held for good."""

    def __init__(self, report: Callable[[str], None]) -> None:
        """Install the handlers; ``report`` gets the name of an early signal, in a thread."""
        # A SimpleQueue may be filled from a signal handler.
        self._noted: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._receiver: Callable[[str], None] = self._noted.put
        self._report = report
        self._is_noted = False
        self._wakeup: socket.socket | None = None
        threading.Thread(target=self._tell_first, name="signals", daemon=True).start()
        self._install()

    def check(self) -> None:
        """Raise KeyboardInterrupt if there was a signal; call it where that is harmless."""
        self._install()
        if self._is_noted:
            raise KeyboardInterrupt

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Raise KeyboardInterrupt at once: for work that may take minutes and leaves nothing behind, like a
        download.
        """
        self.check()
        receiver, self._receiver = self._receiver, _interrupt
        try:
            yield
        finally:
            self._receiver = receiver

    def leave_at_second(self, leave: Callable[[int], None]) -> None:
        """Call ``leave`` at a second signal before ``pass_on``, in a thread: a main thread in C code runs no
        handlers.
        """
        told, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=_wait_second, args=(told, leave), name="second-signal", daemon=True).start()

    def pass_on(self, receiver: Callable[[str], None]) -> None:
        """Pass signals to ``receiver`` from now on, which may be called between any two steps of the main thread."""
        self._receiver = receiver
        if self._wakeup is not None:
            signal.set_wakeup_fd(-1)
            self._wakeup.close()
        self.check()

    def _install(self) -> None:
        """Install the handlers; called more than once, because Ray puts its own in front of ours."""
        for number in _SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores it already
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _: object) -> None:
        self._is_noted = True
        self._receiver(signal.Signals(number).name)

    def _tell_first(self) -> None:
        self._report(self._noted.get())


def _wait_second(told: socket.socket, leave: Callable[[int], None]) -> None:
    num_signals = 0
    with told:
        while number := told.recv(1):
            num_signals += number[0] in _SIGNALS
            if num_signals == 2:
                leave(number[0])


def _interrupt(_: str) -> None:
    raise KeyboardInterrupt
