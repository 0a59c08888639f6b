"""Pool of processes that preprocess bodies, so that no body delays the requests of other clients."""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any

from cluster.processes import INSTALL_FOLDER
from cluster.spec.config import DeployConfig
from router.errors import ApiError
from router.fair_queue import FairQueue
from router.page_index import LONG_TOKENS
from router.preprocess.body import extract_ids
from router.preprocess.job import (
    LENGTH_BYTES,
    Job,
    JobRefusal,
    JsonText,
    Outcome,
    Preprocessed,
    Ready,
    Route,
    Setup,
    decode_outcome,
    encode,
)
from router.preprocess.model import ServedModel
from router.preprocess.preprocessor import NotInlineError, preprocess
from router.preprocess.process import error_of

_log = logging.getLogger(__name__)

NUM_PROCESSES = 3
_MOST_OF_TENANT = NUM_PROCESSES - 1
"""Maximum number of processes that work for one tenant, so that its longest bodies leave one to all others."""
INLINE_BYTES = 4096
"""Size of a body, without a list of token ids, up to which the router preprocesses it itself, in milliseconds."""
_ID_BYTES = 12
"""Maximum size of a token id in a body, with white space."""
_WALL_S = 60.0
"""Maximum time for one body, or the start of a process, on a busy machine."""
_LEFT_S = 1.0
"""Maximum time that a process goes on after the client has left. A new process takes about as long to start."""
MAX_WAITING = 2000
"""Maximum number of bodies that wait for a process."""
_S_PER_BYTE = 1e-7
"""Time to tokenize one byte of a text."""
_RETRY_S = 1.0
"""Time after which a process that could not start is started again."""


class PreprocessPool:
    """Preprocesses small bodies itself and all others in processes, which serve the clients fairly.

    Not thread-safe: all methods run in one event loop.
    """

    def __init__(self, config: DeployConfig, folder: Path, model: ServedModel) -> None:
        self._setup = encode(Setup(config=config.model_dump_json(), folder=str(folder)))
        self._model = model
        self._waiting: FairQueue[_Waiting] = FairQueue()
        self._changed = asyncio.Condition()
        self._is_needed = asyncio.Event()
        self._num_ready = 0
        """Number of processes that take jobs."""
        self._num_running: Counter[str] = Counter()
        """Number of processes that work for each tenant."""
        self._has_stopped = False

    def start_processes(self) -> None:
        """Start the processes, which takes a second or two, before the first job needs them."""
        self._is_needed.set()

    async def serve(self) -> None:
        """Run the processes, once they are needed, until cancelled; then fail the jobs that wait and all later ones."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(NUM_PROCESSES):
                    group.create_task(self._serve())
        finally:
            self._has_stopped = True
            for waiting in self._waiting:
                waiting.fail(_stopped())

    async def run(self, job: Job, tenant: str, weight: float = 1.0) -> Preprocessed | JsonText:
        """Preprocess a body in one of the processes.

        Raises:
            ApiError: the body is wrong, takes too much time or memory, or has to wait behind too many others.
        """
        self.start_processes()
        waiting = _Waiting(job, tenant, weight)
        await self._push(waiting)
        try:
            return await waiting.outcome
        finally:
            self._waiting.remove(waiting)

    def run_inline(self, job: Job) -> Preprocessed | JsonText | None:
        """Preprocess a body in this process. Return None if that could take long. Raises ApiError like ``run``."""
        extracted = None
        if len(job.body) > INLINE_BYTES:
            if job.route is not Route.COMPLETIONS or len(job.body) > INLINE_BYTES + LONG_TOKENS * _ID_BYTES:
                return None
            extracted = extract_ids(job.body)
            if extracted is None or len(extracted.rest) > INLINE_BYTES or len(extracted.ids) > LONG_TOKENS:
                return None
        with suppress(NotInlineError):
            return preprocess(self._model, job, extracted)
        return None

    async def _push(self, waiting: "_Waiting") -> None:
        async with self._changed:
            if self._has_stopped:
                waiting.fail(_stopped())
            if waiting.outcome.done():
                return
            self._waiting.push(waiting, waiting.tenant, waiting.cost_s, waiting.weight)
            if len(self._waiting) > MAX_WAITING:
                dropped = self._waiting.least_entitled()
                self._waiting.remove(dropped)
                dropped.fail(_busy(f"{MAX_WAITING} requests wait to be read, most of them with this key; try again"))
            if self._num_running[waiting.tenant] < _MOST_OF_TENANT:
                self._changed.notify_all()

    async def _serve(self) -> None:
        await self._is_needed.wait()
        num_failures = 0
        last: _Waiting | None = None
        while True:
            try:
                async with self._ready_process() as process:
                    num_failures = 0
                    self._num_ready += 1
                    await self._release(last)
                    last = None
                    try:
                        last = await self._serve_with(process)
                    finally:
                        self._num_ready -= 1
            except OSError as error:
                _log.error("a preprocessing process could not start: %s", error)
                num_failures += 1
                await self._release(last)
                last = None
                if num_failures > 1 and not self._num_ready:
                    for waiting in self._waiting:
                        waiting.fail(_busy("the router cannot start the process that reads this request; try again"))
                await asyncio.sleep(_RETRY_S)

    @asynccontextmanager
    async def _ready_process(self) -> AsyncGenerator["_Process", None]:
        """Start a process that takes jobs; kill it on exit. Raises OSError if it does not start."""
        async with _started() as process:
            try:
                answer = await asyncio.wait_for(process.call(self._setup), _WALL_S)
            except TimeoutError:
                raise ChildProcessError(f"it is not ready after {_WALL_S:g} s") from None
            if not isinstance(answer, Ready):
                raise ChildProcessError("its output says why")
            yield process

    async def _serve_with(self, process: "_Process") -> "_Waiting | None":
        """Give jobs to a process until it ends or has to be ended. Return the job that ended it.

        That job's tenant has one process less until another one takes the place of this.
        """
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._next() is not None)
                if process.has_ended:
                    return None
                waiting = self._next()
                assert waiting is not None
                self._waiting.take(waiting)
                self._num_running[waiting.tenant] += 1
            begin_s = time.monotonic()
            is_well = await self._do(process, waiting)
            more_s = time.monotonic() - begin_s - waiting.cost_s
            self._waiting.charge(waiting.tenant, max(more_s, 0.0), waiting.weight)
            if not is_well:
                return waiting
            await self._release(waiting)

    async def _release(self, waiting: "_Waiting | None") -> None:
        """Let another process work for the tenant of a job that is over."""
        if waiting is not None:
            self._num_running -= Counter([waiting.tenant])  # forgets tenants without a process
            async with self._changed:
                self._changed.notify_all()

    def _next(self) -> "_Waiting | None":
        """Return the first job of a tenant that may use one more process."""
        if not len(self._waiting):
            return None
        firsts = [self._waiting.first, *self._waiting.behind_first()]
        return next((each for each in firsts if self._num_running[each.tenant] < _MOST_OF_TENANT), None)

    async def _do(self, process: "_Process", waiting: "_Waiting") -> bool:
        """Do a job. Return False if the process has ended or has to be ended."""
        call = asyncio.create_task(process.call(encode(waiting.job)))
        try:
            ends: list[asyncio.Future[Any]] = [call, waiting.outcome]
            await asyncio.wait(ends, timeout=_WALL_S, return_when=asyncio.FIRST_COMPLETED)
            if waiting.outcome.done():
                await asyncio.wait([call], timeout=_LEFT_S)
            if not call.done():
                waiting.fail(_busy(f"the router is too busy to read this request within {_WALL_S:g} s; try again"))
                return False
            outcome = call.result()
            match outcome:
                case Preprocessed() | JsonText():
                    waiting.succeed(outcome)
                    return True
                case JobRefusal():
                    waiting.fail(outcome.error)
                    return True
            status = await process.status()
            if status == -signal.SIGKILL and not waiting.was_killed and not waiting.outcome.done():
                waiting.was_killed = True
                await self._push(waiting)
            else:
                waiting.fail(error_of(status))
        except asyncio.CancelledError:
            waiting.fail(_stopped())
            raise
        finally:
            call.cancel()
        return False


class _Waiting:
    """Job that waits for its outcome."""

    def __init__(self, job: Job, tenant: str, weight: float) -> None:
        self.job = job
        self.tenant = tenant
        self.weight = weight
        self.cost_s = len(job.body) * _S_PER_BYTE
        """Time that the job takes if it is simple."""
        self.was_killed = False
        """True if a process was killed by somebody else while it did this job, for which the job may be the reason."""
        self.outcome: asyncio.Future[Preprocessed | JsonText] = asyncio.get_running_loop().create_future()
        """Cancelled if the client leaves."""

    def succeed(self, outcome: Preprocessed | JsonText) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)

    def fail(self, error: ApiError) -> None:
        if not self.outcome.done():
            self.outcome.set_exception(error)


@asynccontextmanager
async def _started() -> AsyncGenerator["_Process", None]:
    """Start a process; kill it on exit."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "router.preprocess.process"],
                stdin=theirs.fileno(),
                cwd=INSTALL_FOLDER,
                env=os.environ | {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            )
        try:
            reader, writer = await asyncio.open_unix_connection(sock=ours)
            try:
                yield _Process(process, reader, writer)
            finally:
                writer.transport.abort()
        finally:
            process.kill()
            await asyncio.to_thread(process.wait)  # the kernel may take a while to free its memory


class _Process:
    """One process, which does one job at a time."""

    def __init__(
        self, process: "subprocess.Popen[bytes]", reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    async def call(self, message: bytes) -> Outcome | None:
        """Return the answer to a message; None if the process has ended."""
        try:
            self._writer.write(len(message).to_bytes(LENGTH_BYTES, "little"))
            self._writer.write(message)
            await self._writer.drain()
            length = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "little")
            return decode_outcome(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    @property
    def has_ended(self) -> bool:
        return self._reader.at_eof()

    async def status(self) -> int:
        """Return the exit status of a process that has closed its socket."""
        return await asyncio.to_thread(self._process.wait)


def _busy(message: str) -> ApiError:
    return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, code="busy")


def _stopped() -> ApiError:
    return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "the router is stopping", code="stopped")
