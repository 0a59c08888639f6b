"""Process that preprocesses bodies for one router: ``python -m router.preprocess.process``, with a socket as stdin.

The kernel ends it if a body takes too much time or memory. From its exit status, the router tells the client why, and
it starts another process.
"""

import os
import resource
import signal
import socket
import traceback
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path

from cluster.grammar import Grammars
from cluster.spec.config import DeployConfig
from router.errors import ApiError, bad_request, internal_error
from router.preprocess.id_reader import compiled_reader
from router.preprocess.job import (
    LENGTH_BYTES,
    Job,
    JobRefusal,
    JsonText,
    Preprocessed,
    Ready,
    Setup,
    decode_job,
    encode,
)
from router.preprocess.model import ServedModel, read_model
from router.preprocess.preprocessor import preprocess

TIME_S = 10.0
"""Maximum processor time for one body."""
GRAMMAR_S = 0.5
"""Maximum processor time for the grammar of one body, which the replicas also have to compile."""
MEMORY_BYTES = 4 << 30
"""Maximum memory of one process. A text of four million tokens takes 1.5 GiB."""
_NICENESS = 5
"""Niceness, so that the requests that run go on while bodies are read on a machine without free cores."""
_MEMORY = f"the body takes more than {MEMORY_BYTES >> 30} GiB of memory to read; allowed: a shorter one"
_PROBLEMS: Mapping[int, str] = {
    signal.SIGPROF: f"the body takes more than {TIME_S:g} s of processor time to read; allowed: a shorter one",
    signal.SIGVTALRM: f"the grammar or schema takes more than {GRAMMAR_S:g} s to compile; allowed: a simpler one",
}
"""Reason of a process's end, by the signal with which the kernel ended it."""


class TimedGrammars(Grammars):
    """Grammars whose compilation ends the process if it takes too long."""

    @contextmanager
    def limited(self) -> Generator[None, None, None]:
        self.wait()
        signal.setitimer(signal.ITIMER_VIRTUAL, GRAMMAR_S)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def error_of(status: int) -> ApiError:
    """Return the error of the body for which a process ended with this exit status."""
    if status >= 0:
        return internal_error()
    if status == -signal.SIGKILL:  # by somebody else, such as the kernel when the machine has no memory left
        message = "the process that read this request was killed; try again"
        return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, code="busy")
    return bad_request(_PROBLEMS.get(-status, _MEMORY), code="too_complex")


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C stops the driver, which stops everything else
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(_NICENESS)
    with socket.socket(fileno=0) as channel:
        messages = _messages(channel)
        setup = decode_job(next(messages))
        assert isinstance(setup, Setup)
        folder = Path(setup.folder)
        model = read_model(DeployConfig.model_validate_json(setup.config), folder)
        model = replace(model, grammars=TimedGrammars(folder, model.tokenizer.vocab_size))
        compiled_reader()  # before the clock of the first body runs
        _send(channel, Ready())
        for message in messages:
            job = decode_job(message)
            assert isinstance(job, Job)
            signal.setitimer(signal.ITIMER_PROF, TIME_S)
            outcome = _outcome(model, job)
            signal.setitimer(signal.ITIMER_PROF, 0)
            _send(channel, outcome)


def _outcome(model: ServedModel, job: Job) -> Preprocessed | JsonText | JobRefusal:
    try:
        return preprocess(model, job)
    except ApiError as error:
        return JobRefusal.of(error)
    except MemoryError:
        return JobRefusal.of(bad_request(_MEMORY, code="too_complex"))
    except Exception:
        traceback.print_exc()
        return JobRefusal.of(internal_error())


def _messages(channel: socket.socket) -> Iterator[bytes]:
    """Yield messages until the router closes the socket."""
    with channel.makefile("rb") as stream:
        while length := stream.read(LENGTH_BYTES):
            yield stream.read(int.from_bytes(length, "little"))


def _send(channel: socket.socket, message: Preprocessed | JsonText | JobRefusal | Ready) -> None:
    data = encode(message)
    channel.sendall(len(data).to_bytes(LENGTH_BYTES, "little") + data)


if __name__ == "__main__":
    main()
