"""One router process: socket, event loop, inbox and table watcher around the HTTP application."""

import asyncio
import contextlib
import gc
import socket
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

from cluster.bootstrap.client import watch_table
from cluster.channel import AsyncInbox, Outbox
from cluster.grammar import Grammars
from cluster.spec.clock import SystemClock
from cluster.spec.config import DeployConfig
from cluster.spec.ids import Incarnation
from cluster.spec.peer import Peer
from cluster.spec.registry import TableSnapshot
from cluster.spec.worker_spec import Rendezvous, RouterPlace
from cluster.tokenizer import Tokenizer
from router.app import create_app
from router.breaker import Breakers
from router.directory import Directory
from router.dispatch import Dispatch
from router.gate import Gate
from router.http_protocol import HttpProtocol
from router.key_limits import KeyLimits
from router.key_ring import read_keys
from router.listener import listen, reachable
from router.load import LoadBook
from router.metrics import Metrics, Watched
from router.picker import Picker
from router.relay import Relay
from router.service import Service, max_context
from router.siblings import TELL_S, Figures, Now, Siblings
from router.tracing import make_tracing

Watch = Callable[[str, str], AsyncIterator[TableSnapshot]]
"""(bootstrap url, token) -> the table, whenever it changes, for ever."""

ALONE = RouterPlace()
_NEW_OBJECTS = 10_000
"""That are left over before the collector looks at them; those of some dozens of requests."""
_CLOSE_S = 1
"""Time for responses to end when the router stops."""


class RouterServer:
    """Serves HTTP in a thread of its own. Methods may be called from any thread."""

    def __init__(
        self,
        config: DeployConfig,
        model_folder: Path,
        rendezvous: Rendezvous,
        host: str,
        incarnation: Incarnation,
        watch: Watch = watch_table,
        place: RouterPlace = ALONE,
    ) -> None:
        """Read the model's tokenizer and limits.

        Args:
            host: the address that replicas reply to.
            incarnation: of this start, for the replicas.
            place: among the processes that share the port.

        Raises:
            UserError: the model folder, the file of API keys, or OpenTelemetry cannot be used.
        """
        self._config = config
        self._model_folder = model_folder
        self._tokenizer = Tokenizer(model_folder)
        max_context(config, self._tokenizer)
        self._keys = read_keys(config.router)
        self._tracing = make_tracing()
        self._rendezvous = rendezvous
        self._host = host
        self._incarnation = incarnation
        self._watch = watch
        self._place = place
        self._thread: threading.Thread | None = None
        self._running: Future[_Running] = Future()
        self._error: BaseException | None = None

    def start(self) -> str:
        """Listen, and serve in a thread; the base url.

        Raises:
            UserError: the address cannot be listened on; names it.
        """
        assert self._thread is None, "a router starts once"
        listener = listen(self._config.router.host, self._config.router.port, self._place.num_processes > 1)
        port = listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, args=[listener], name="baton-router", daemon=True)
        self._thread.start()
        self._running.result()
        return f"http://{reachable(self._config.router.host, self._host)}:{port}"

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests with 503 and wait for the open ones; True when all of them ended."""
        running = self._running.result()
        waiting = asyncio.run_coroutine_threadsafe(running.relay.drain(), running.loop)
        try:
            waiting.result(timeout_s)
        except TimeoutError:
            waiting.cancel()
            return False
        return True

    def stop(self) -> None:
        """Fail what is open and end the thread; safe to call twice, and before ``start``."""
        if self._thread is None:
            return
        if self._running.exception() is None:
            running = self._running.result()
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                running.loop.call_soon_threadsafe(running.stopped.set)
        self._thread.join()

    def run(self) -> None:
        """Block until ``stop``; raises what ended the router if something else did."""
        assert self._thread is not None, "a router is started before it runs"
        self._thread.join()
        if self._error is not None:
            raise self._error

    def service(self, inbox: AsyncInbox, outbox: Outbox) -> Service:
        """What the HTTP routes stand on; belongs to the running event loop, like the inbox."""
        me = Peer(replica=self._place.name, incarnation=self._incarnation, address=inbox.address)
        config = self._config.router
        directory = Directory(grace_s=self._config.resources.lease_s)
        siblings, clock = Siblings(self._place), SystemClock()
        load = LoadBook(lambda: siblings.loads)
        breakers = Breakers(config.breaker_failures, config.breaker_s)
        picker = Picker(self._config, directory, load, breakers)
        dispatch, metrics = Dispatch(me, config, load, breakers, picker.pair), Metrics()
        gate = Gate(config.max_waiting_requests, config.max_wait_s, lambda: siblings.num_waiting)
        metrics.watch(
            Watched(dispatch, directory, gate, picker.pages, clock, inbox),
            lambda: (figures.told for figures in siblings.figures()),
        )
        relay = Relay(self._config, dispatch, directory, picker, outbox, clock, metrics, siblings, gate.look)
        service = Service(
            config=self._config,
            tokenizer=self._tokenizer,
            relay=relay,
            directory=directory,
            metrics=metrics,
            grammars=Grammars(self._model_folder, self._tokenizer.vocab_size),
            gate=gate,
            limits=KeyLimits(clock, siblings),
            keys=self._keys,
            siblings=siblings,
            tracing=self._tracing,
        )
        siblings.watch(
            lambda: Now(relay.num_open, gate.num_waiting, load.lines(), service.limits.told(), relay.timelines.told()),
            lambda: Figures(metrics.told(), list(service.recent.tell())),
        )
        return service

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
        outbox = Outbox(self._rendezvous.channel_key)
        try:
            async with AsyncInbox(self._host, self._rendezvous.channel_key) as inbox:
                await self._serve_until_stopped(listener, inbox, outbox)
        finally:
            outbox.close()

    async def _serve_until_stopped(self, listener: socket.socket, inbox: AsyncInbox, outbox: Outbox) -> None:
        service = self.service(inbox, outbox)
        server = uvicorn.Server(_uvicorn_config(service))
        running = _Running(asyncio.get_running_loop(), service.relay)
        parts = {
            asyncio.create_task(_receive(inbox, service.relay)),
            asyncio.create_task(self._follow_table(service.relay)),
            *([] if service.siblings.is_alone else [asyncio.create_task(_look_at_siblings(service))]),
            asyncio.create_task(running.stopped.wait()),
        }
        serving = asyncio.create_task(self._serve_http(server, listener, service))
        self._running.set_result(running)
        await asyncio.wait({*parts, serving}, return_when=asyncio.FIRST_COMPLETED)
        service.relay.stop()
        server.should_exit = True
        await _settle(parts, serving)
        service.grammars.close()
        if service.tracing is not None:
            await asyncio.to_thread(service.tracing.close)

    async def _serve_http(self, server: uvicorn.Server, listener: socket.socket, service: Service) -> None:
        # Others on the port take requests already: this one joins them when it can as well.
        while not service.siblings.is_alone and service.directory.snapshot is None and not server.should_exit:
            await asyncio.sleep(TELL_S)
        await server.serve(sockets=[listener])

    async def _follow_table(self, relay: Relay) -> None:
        async for snapshot in self._watch(self._rendezvous.bootstrap_url, self._rendezvous.token):
            relay.on_table(snapshot)
        raise RuntimeError("the watch of the bootstrap table ended")


def spare_requests_collections() -> None:
    """For a process that is a router and nothing else: what it has loaded stays, and need not be looked at again.

    Otherwise the garbage collector goes through all of it while requests wait, some times a second.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, 20, 20)


class _Running:
    """What the thread that serves shows to the others."""

    def __init__(self, loop: asyncio.AbstractEventLoop, relay: Relay) -> None:
        self.loop = loop
        self.relay = relay
        self.stopped = asyncio.Event()


async def _receive(inbox: AsyncInbox, relay: Relay) -> None:
    while True:
        for message in await inbox.receive():
            relay.on_message(message)


async def _look_at_siblings(service: Service) -> None:
    """Tell the others what has changed, and let those in who waited for what has ended there."""
    while True:
        service.siblings.look()
        service.gate.look()
        await asyncio.sleep(TELL_S)


async def _settle(parts: set[asyncio.Task[Any]], serving: asyncio.Task[None]) -> None:
    """End every part; raise the first error that one of them ended with by itself."""
    ended = [part for part in parts if part.done()]
    for part in parts:
        part.cancel()
    await serving
    await asyncio.gather(*parts, return_exceptions=True)
    for part in ended:
        part.result()


def _uvicorn_config(service: Service) -> uvicorn.Config:
    return uvicorn.Config(
        create_app(service),
        http=HttpProtocol,
        lifespan="off",
        log_config=None,
        proxy_headers=False,
        access_log=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=_CLOSE_S,
    )
