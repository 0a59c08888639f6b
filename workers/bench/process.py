"""Worker processes on this machine, called over a pipe."""

import multiprocessing
import os
import signal
from collections.abc import Mapping
from contextlib import ExitStack
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from cluster.spec.errors import BatonError, UserError

ANSWER_TIMEOUT_S = 600.0
_EXIT_S = 10.0
"""Maximum time that an idle process may take to exit."""
WORKER = "workers.worker:Worker"

_context = multiprocessing.get_context("forkserver")
# The fork server imports modules such as torch, which take seconds, once for all workers.
_context.set_forkserver_preload([WORKER.partition(":")[0]])


class RemoteError(BatonError):
    """Failed call to a worker process, which returned an error or did not respond."""

    def __init__(self, message: str, user_message: str = "") -> None:
        """Create the error. ``user_message`` is that of a UserError, without its type; empty for other errors."""
        super().__init__(message)
        self.user_message = user_message


class WorkerProcess:
    """Process that runs one worker after another, since starting a process takes seconds.

    ``worker`` names a class with a ``close`` method as "module:class". The calling process does not import it.
    """

    def __init__(self, worker: str = WORKER) -> None:
        self._pipe, theirs = _context.Pipe()
        self._process = _context.Process(target=_serve, args=(theirs, worker, dict(os.environ)), daemon=True)
        self._process.start()
        theirs.close()

    def call(self, method: str, *args: Any) -> None:
        """Start a method of the worker; ``result`` waits for it. Raises RemoteError if the process has died."""
        try:
            self._pipe.send((method, args))
        except ConnectionError:
            raise self._death() from None

    def result(self, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        try:
            if not self._pipe.poll(timeout_s):
                raise RemoteError(f"worker process {self._process.pid} did not answer within {timeout_s} s")
            ok, value = self._pipe.recv()
        # The error is a ConnectionError if the process died before it read the call.
        except (EOFError, ConnectionError):
            raise self._death() from None
        if not ok:
            raise RemoteError(*value)
        return value

    def stop(self) -> None:
        """Make the process exit; ``close`` waits for it."""
        self._pipe.close()

    def close(self) -> None:
        self.stop()
        self._process.join(_EXIT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _death(self) -> RemoteError:
        # The pipe breaks before the exit code is known.
        self._process.join(_EXIT_S)
        return RemoteError(f"worker process {self._process.pid} died, exit code {self._process.exitcode}")


def _serve(pipe: Connection, name: str, environ: Mapping[str, str]) -> None:
    """Answer calls until the pipe closes. The call ``make`` replaces the worker with a new one."""
    # The fork server's environment is outdated.
    os.environ.clear()
    os.environ.update(environ)
    # Ctrl-C reaches all processes of the terminal; the caller ends this one by closing the pipe.
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
                user_message = str(error) if isinstance(error, UserError) else ""
                answer = (False, (f"{type(error).__name__}: {error}", user_message))
            try:
                pipe.send(answer)
            except BrokenPipeError:
                return
