"""Handling of Ctrl-C, SIGTERM and SIGHUP in each stage of `baton up`."""

import queue
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """Handlers that record a signal, because an exception raised at an arbitrary point can leave a lock held."""

    def __init__(self, report: Callable[[str], None]) -> None:
        """Install the handlers. A thread calls ``report`` with the first signal's name unless ``pass_on`` is first."""
        # A SimpleQueue may be filled from a signal handler.
        self._early: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._receiver: Callable[[str], None] = self._early.put
        self._first = ""
        self._wakeup: socket.socket | None = None
        threading.Thread(target=lambda: report(self._early.get()), name="signals", daemon=True).start()
        self._install()

    def check(self) -> None:
        """Raise KeyboardInterrupt with the first signal's name, if one has arrived.

        Call this where an exception is harmless.
        """
        self._install()
        if self._first:
            _interrupt(self._first)

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Let signals raise KeyboardInterrupt at any point in this context; for long work that is safe to abort."""
        self.check()
        receiver, self._receiver = self._receiver, _interrupt
        try:
            yield
        finally:
            self._receiver = receiver

    def leave_at_second(self, leave: Callable[[int], None]) -> None:
        """Call ``leave`` if a second signal arrives before ``pass_on`` is called."""
        # In a thread, because the main thread runs no signal handlers while it is in C code.
        receiver, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=_wait_second, args=(receiver, leave), name="second-signal", daemon=True).start()

    def pass_on(self, receiver: Callable[[str], None]) -> None:
        """Pass signals to ``receiver`` from now on. It can interrupt the main thread at any point."""
        self._receiver = receiver
        if self._wakeup is not None:
            signal.set_wakeup_fd(-1)
            self._wakeup.close()
        self.check()

    def _install(self) -> None:
        # Called more than once, because Ray replaces the handlers.
        for number in _SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # already ignored under nohup
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _: object) -> None:
        name = signal.Signals(number).name
        self._first = self._first or name
        self._receiver(name)


def _wait_second(receiver: socket.socket, leave: Callable[[int], None]) -> None:
    num_signals = 0
    with receiver:
        while number := receiver.recv(1):
            num_signals += number[0] in _SIGNALS
            if num_signals == 2:
                leave(number[0])


def _interrupt(name: str) -> None:
    raise KeyboardInterrupt(name)
