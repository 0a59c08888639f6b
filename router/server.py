"""One router process: the HTTP application's sockets, event loop, inbox and table watcher."""

import asyncio
import contextlib
import errno
import socket
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

from cluster.bootstrap.client import follow_table_async
from cluster.channel import AsyncInbox, Outbox
from cluster.http.crowd import handles_of
from cluster.http.reader import read_in_turn
from cluster.spec.clock import LEASE_S, SystemClock
from cluster.spec.config import DeployConfig
from cluster.spec.errors import UserError
from cluster.spec.ids import Incarnation, Peer
from cluster.spec.registry import TableSnapshot
from cluster.spec.worker_spec import ALONE, Rendezvous, RouterShare
from router.admission import Gate
from router.api_keys import KeyLimits, read_keys
from router.app import create_app
from router.connection import RouterProtocol
from router.directory import Breakers, Directory, LoadBook
from router.dispatch import RequestTable, max_unanswered
from router.metrics import Metrics
from router.parity_probe import ParityProbe
from router.picker import Picker
from router.preprocess.id_reader import compiled_reader
from router.preprocess.model import read_model
from router.preprocess.pool import PreprocessPool
from router.records import make_tracing
from router.relay import Relay
from router.service import Service
from router.state_metrics import StateMetrics

Watch = Callable[[str, str, Callable[[], float]], AsyncIterator[TableSnapshot | None]]
"""Function (bootstrap URL, token, maximum wait) that returns an endless stream of the table's answers."""

_CLOSE_S = 1
"""Maximum time to finish responses when the router stops."""
_TABLE_S = 0.02
"""Interval between checks for the rank table."""


class RouterServer:
    """Router that serves HTTP in its own thread. Thread-safe."""

    def __init__(
        self,
        config: DeployConfig,
        model_folder: Path,
        rendezvous: Rendezvous,
        host: str,
        incarnation: Incarnation,
        watch: Watch = follow_table_async,
        share: RouterShare = ALONE,
    ) -> None:
        """Read the model's tokenizer and limits.

        Args:
            host: address to which replicas reply.
            share: this process's share of the port and the limits.

        Raises:
            UserError: the model folder, the API keys or OpenTelemetry cannot be used.
        """
        self._config = config
        self._model_folder = model_folder
        self._model = read_model(config, model_folder)
        compiled_reader()  # now, not while the first clients wait
        self._keys = read_keys(config.router)
        self._tracing = make_tracing()
        self._rendezvous = rendezvous
        self._host = host
        self._incarnation = incarnation
        self._watch = watch
        self._share = share
        self._thread: threading.Thread | None = None
        self._running: Future[_Running] = Future()
        self._error: BaseException | None = None
        self._is_drained = False

    def start(self) -> str:
        """Start serving in a thread; return the endpoint's URL."""
        assert self._thread is None, "a router can start only once"
        is_shared = self._share.num_processes > 1
        listener = _listen(self._config.router.host, self._config.router.port, is_shared)
        url = f"http://{_reachable(self._config.router.host, self._host)}:{listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, args=[listener], name="baton-router", daemon=True)
        self._thread.start()
        self._running.result()
        return url

    @property
    def address(self) -> str:
        """Channel address at which a started router gets messages, CheckHealth and Drain among them."""
        return self._running.result().address

    def start_preprocessing(self) -> None:
        """Start the processes that preprocess long bodies, before the first one arrives."""
        running = self._running.result()
        running.loop.call_soon_threadsafe(running.preprocess.start_processes)

    def stop(self) -> None:
        """Fail open requests and end the thread. Can be called twice, and before ``start``."""
        if self._thread is None:
            return
        if self._running.exception() is None:
            running = self._running.result()
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                running.loop.call_soon_threadsafe(running.stopped.set)
        self._thread.join()

    def run(self) -> bool:
        """Block until ``stop`` or the end of a drain; return whether a drain finished all open requests.

        Raises the error if the router fails.
        """
        assert self._thread is not None, "start the router before running it"
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._is_drained

    def service(self, inbox: AsyncInbox, outbox: Outbox) -> Service:
        """Return the parts that the HTTP routes use in the running event loop."""
        me = Peer(replica=self._share.name, incarnation=self._incarnation, address=inbox.address)
        config, clock, metrics = self._config.router, SystemClock(), Metrics()
        directory = Directory(grace_s=LEASE_S)
        load, breakers = LoadBook(), Breakers()
        picker = Picker(self._config, directory, load, breakers, share=self._share)
        most = max_unanswered(self._config.resources.step_timeout_s)
        requests = RequestTable(me, load, breakers, picker.pick, max_unanswered=most)
        gate = Gate(self._share.of(config.max_waiting_requests), config.max_wait_s)
        parity = ParityProbe(self._config, self._share, directory, metrics) if config.parity_probe_s else None
        metrics.registry.register(StateMetrics(requests, directory, gate, picker.pages, clock, inbox))
        return Service(
            config=self._config,
            model=self._model,
            preprocess=PreprocessPool(self._config, self._model_folder, self._model),
            relay=Relay(self._config, requests, directory, picker, outbox, clock, metrics, gate.look, parity),
            requests=requests,
            directory=directory,
            metrics=metrics,
            gate=gate,
            limits=KeyLimits(config, self._share, clock),
            keys=self._keys,
            share=self._share,
            started=self._rendezvous.started,
            parity=parity,
            tracing=self._tracing,
        )

    def _serve(self, listener: socket.socket) -> None:
        try:
            uvloop.run(self._main(listener))
        except BaseException as error:
            self._error = error
            if not self._running.done():
                self._running.set_exception(error)
        finally:
            listener.close()

    async def _main(self, listener: socket.socket) -> None:
        key = self._rendezvous.channel_key
        with contextlib.closing(Outbox(key)) as outbox:
            async with AsyncInbox(self._host, key) as inbox:
                await self._serve_until_stopped(listener, self.service(inbox, outbox), inbox)

    async def _serve_until_stopped(self, listener: socket.socket, service: Service, inbox: AsyncInbox) -> None:
        server = uvicorn.Server(_uvicorn_config(service))
        running = _Running(asyncio.get_running_loop(), service)
        tasks = {
            asyncio.create_task(service.relay.receive(inbox)),
            asyncio.create_task(self._follow_table(service.relay)),
            asyncio.create_task(service.preprocess.serve()),
            asyncio.create_task(running.stopped.wait()),
            asyncio.create_task(self._drain(service.relay)),
        }
        if service.parity is not None:
            open_answer, now_s = service.relay.open, service.relay.now_s
            probing = service.parity.run(open_answer, lambda: service.gate.num_waiting > 0, now_s)
            tasks.add(asyncio.create_task(probing))
        serving = asyncio.create_task(self._serve_http(server, listener, service))
        self._running.set_result(running)
        await asyncio.wait({*tasks, serving}, return_when=asyncio.FIRST_COMPLETED)
        service.relay.stop()
        server.should_exit = True
        await _settle(tasks, serving)
        if service.tracing is not None:
            await asyncio.to_thread(service.tracing.close)

    async def _serve_http(self, server: uvicorn.Server, listener: socket.socket, service: Service) -> None:
        # Other processes may already accept requests on the port; this one joins them when it is ready.
        while self._share.num_processes > 1 and service.directory.snapshot is None and not server.should_exit:
            await asyncio.sleep(_TABLE_S)
        await server.serve(sockets=handles_of(listener))

    async def _drain(self, relay: Relay) -> None:
        """Once the driver asks for it, refuse new requests with 503 and wait for the open ones."""
        await relay.drain_asked.wait()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(relay.drain(), self._config.router.drain_s)
            self._is_drained = True

    async def _follow_table(self, relay: Relay) -> None:
        meeting = self._rendezvous
        async for snapshot in self._watch(meeting.bootstrap_url, meeting.token, lambda: relay.watch_s):
            relay.on_table(snapshot)
        raise RuntimeError("the task that watches the bootstrap table ended")


class _Running:
    def __init__(self, loop: asyncio.AbstractEventLoop, service: Service) -> None:
        self.loop = loop
        self.address = service.requests.me.address
        self.preprocess = service.preprocess
        self.stopped = asyncio.Event()


async def _settle(tasks: set[asyncio.Task[Any]], serving: asyncio.Task[None]) -> None:
    """Cancel every task; raise the first error of a task that had already ended."""
    ended = [task for task in tasks if task.done()]
    for task in tasks:
        task.cancel()
    await serving
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in ended:
        task.result()


def _uvicorn_config(service: Service) -> uvicorn.Config:
    return uvicorn.Config(
        create_app(service),
        http=read_in_turn(type(RouterProtocol.__name__, (RouterProtocol,), {"keys": service.keys})),
        ws="none",
        lifespan="off",
        log_config=None,
        proxy_headers=False,
        access_log=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=_CLOSE_S,
    )


def _listen(host: str, port: int, is_shared: bool = False) -> socket.socket:
    """Bind a TCP socket; port 0 takes a free one.

    Args:
        is_shared: True if other processes may use the port too. The kernel distributes connections among all listeners,
            so the caller must call ``listen`` only when it is ready.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if is_shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
        if not is_shared:
            listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            message = f"router.port: {host}:{port} is taken by another process; set a free port, or 0 for any"
            raise UserError(message) from error
        raise UserError(f"router.host: cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


def _reachable(listening: str, own: str) -> str:
    host = own if listening in ("0.0.0.0", "::") else listening
    return f"[{host}]" if ":" in host else host
