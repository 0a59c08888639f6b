"""Worker processes on this machine, called over a pipe. This module imports nothing heavy."""

import multiprocessing
import os
import signal
from collections.abc import Mapping
from contextlib import ExitStack
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from cluster.spec.errors import BatonError

ANSWER_TIMEOUT_S = 600.0
_EXIT_S = 10.0
"""Maximum wait for an idle process to end."""
WORKER = "workers.worker:Worker"

_context = multiprocessing.get_context("forkserver")
# Modules that take workers seconds to import, torch above all, are imported once, by the process that they are forked
# from.
_context.set_forkserver_preload([WORKER.partition(":")[0]])


class RemoteError(BatonError):
    """Error of a worker process that answered a call with an error, or died."""


class WorkerProcess:
    """Process that runs one worker after another, called over a pipe. It is reused because starting it takes seconds.

    ``worker`` names the class as "module:class"; it has a ``close``. The process that calls does not import it.
    """

    def __init__(self, worker: str = WORKER) -> None:
        self._pipe, theirs = _context.Pipe()
        self._process = _context.Process(target=_serve, args=(theirs, worker, dict(os.environ)), daemon=True)
        self._process.start()
        theirs.close()

    def call(self, method: str, *args: Any) -> None:
        """Start a method of the worker; ``result`` waits for it. Raises RemoteError when the process is dead."""
        try:
            self._pipe.send((method, args))
        except ConnectionError:
            raise self._death() from None

    def result(self, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        """Return the last call's result; raises RemoteError with the worker's own message."""
        try:
            if not self._pipe.poll(timeout_s):
                raise RemoteError(f"worker process {self._process.pid} did not answer within {timeout_s} s")
            ok, value = self._pipe.recv()
        # The latter if it has died before it took the call from the pipe.
        except (EOFError, ConnectionError):
            raise self._death() from None
        if not ok:
            raise RemoteError(value)
        return value

    def stop(self) -> None:
        """Ask the process to end; ``close`` waits for it."""
        self._pipe.close()

    def close(self) -> None:
        """End the process."""
        self.stop()
        self._process.join(_EXIT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _death(self) -> RemoteError:
        # The pipe breaks shortly before the exit code is known.
        self._process.join(_EXIT_S)
        return RemoteError(f"worker process {self._process.pid} died, exit code {self._process.exitcode}")


def _serve(pipe: Connection, name: str, environ: Mapping[str, str]) -> None:
    """Run the worker process: answer calls until the pipe closes. ``make`` replaces the worker by a new one."""
    # The process that it is forked from has an outdated environment.
    os.environ.clear()
    os.environ.update(environ)
    # Ctrl-C reaches the whole terminal; the caller ends this process by closing the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    module, _, attribute = name.partition(":")
    make = getattr(import_module(module), attribute)
    with ExitStack() as stack:
        worker: Any = None
        while True:
            try:
                method, args = pipe.recv()
            except EOFError:
                return
            try:
                answer: tuple[bool, Any] = (True, None)
                if method == "make":
                    stack.close()
                    worker = make(*args)
                    stack.callback(worker.close)
                else:
                    answer = (True, getattr(worker, method)(*args))
            except Exception as error:
                answer = (False, f"{type(error).__name__}: {error}")
            try:
                pipe.send(answer)
            except BrokenPipeError:
                return
