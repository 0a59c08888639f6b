"""`baton bench router`: the time a router adds and the load it carries, before replicas that answer at once. No torch.

Router, replicas and clients are a process each. Where the machine has fewer idle cores they share them, so the result
says how much of a core each of them used.
"""

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvloop

from cluster.bench.http_load import Connection, request_of
from cluster.bench.statistics import Quantiles, quantiles_ms
from cluster.bench.workload import FIRST_WORD_ID, check_least
from cluster.spec.config import DeployConfig, ModelConfig, RouterConfig
from cluster.spec.errors import UserError
from workers.worker_process import WorkerProcess

_REPLICAS = "cluster.bench.mock_replicas:MockReplicas"
_ROUTER = "cluster.bench.router_host:RouterHost"
_ANSWERER = "cluster.bench.answerer:Answerer"
_PATH = "/v1/completions"
_WARM_UP_S = 1.0
_LOOK_S = 0.05
_ID_LEN = 3
_IDS = range(FIRST_WORD_ID, 10**_ID_LEN)
"""All are written in as many bytes, so that one may stand for another."""
_NUM_VARIED = 8
"""Ids at the beginning of a prompt that nobody asked before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterBench:
    """One run. Raises UserError when a value makes no sense."""

    model_folder: Path
    prompt_lens: tuple[int, ...] = (32, 8192)
    num_connections: int = 32
    """Clients of short answers, each with one request at a time."""
    num_streams: int = 64
    stream_len: int = 256
    """Tokens of each stream."""
    seconds: float = 5.0
    """Of each of the four measurements."""
    known_share: float = 0.5
    """Part of the requests whose prompt was served before; the others differ in their first page."""

    def __post_init__(self) -> None:
        check_least("--prompt-len", min(self.prompt_lens), 1)
        check_least("--connections", self.num_connections, 1)
        check_least("--streams", self.num_streams, 1)
        check_least("--stream-len", self.stream_len, 1)
        if not 0 <= self.known_share <= 1:
            raise UserError(f"--known-share: got {self.known_share:g}; allowed: 0 to 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterResult:
    """For prompts of one length, given as token ids."""

    prompt_len: int
    added_p50_ms: float
    """From a request for one token to its answer, at half of ``req_per_s``, less what it takes without a router."""
    added_p99_ms: float
    """The same of the slowest: one quantile less the other."""
    direct_p50_ms: float
    """The same requests at the same times, of a process that answers at once and reads nothing."""
    direct_p99_ms: float
    req_per_s: float
    """Requests for one token, answered whole."""
    stream_tok_per_s: float
    request_cores: dict[str, float]
    """Processor seconds a second of each process, where ``req_per_s`` was measured."""
    half_cores: dict[str, float]
    """The same where the added times were measured: near a whole core of the router, they are those of a queue."""
    stream_cores: dict[str, float]


class RouterRun:
    """The processes of one run; close it at its end."""

    def __init__(self, bench: RouterBench) -> None:
        self._bench = bench
        config = DeployConfig(
            model=ModelConfig(path=str(bench.model_folder), served_name="mock"), router=RouterConfig(port=0)
        )
        self._processes = {"replicas": WorkerProcess(_REPLICAS), "router": WorkerProcess(_ROUTER)}
        self._call("replicas", "make", FIRST_WORD_ID)
        self._call("replicas", "start")
        self._call("router", "make", config, bench.model_folder, self._call("replicas", "table"))
        self._url: str = self._call("router", "start")
        self._answerer = WorkerProcess(_ANSWERER)
        self._answerer.call("make")
        self._answerer.result()
        self._answerer.call("start")
        self._direct_url: str = self._answerer.result()
        while httpx.get(f"{self._url}/ready").status_code != httpx.codes.OK:
            time.sleep(_LOOK_S)

    def close(self) -> None:
        """End every process."""
        for process in (self._answerer, *reversed(self._processes.values())):
            process.close()

    async def measure(self, prompt_len: int) -> RouterResult:
        """All figures for one length of prompts."""
        whole = self._prompts(prompt_len, 1)
        streamed = self._prompts(prompt_len, self._bench.stream_len, stream=True)
        await self._full_load(whole, self._bench.num_connections, _WARM_UP_S)
        num_replies, _, duration_s, request_cores = await self._full_load(
            whole, self._bench.num_connections, self._bench.seconds
        )
        req_per_s = num_replies / duration_s
        took, half_cores = await self._half_load(whole, req_per_s / 2, self._url)
        direct, _ = await self._half_load(whole, req_per_s / 2, self._direct_url)
        _, num_tokens, duration_s, stream_cores = await self._full_load(
            streamed, self._bench.num_streams, self._bench.seconds
        )
        return RouterResult(
            prompt_len=prompt_len,
            added_p50_ms=took.p50 - direct.p50,
            added_p99_ms=took.p99 - direct.p99,
            direct_p50_ms=direct.p50,
            direct_p99_ms=direct.p99,
            req_per_s=req_per_s,
            stream_tok_per_s=num_tokens / duration_s,
            request_cores=request_cores,
            half_cores=half_cores,
            stream_cores=stream_cores,
        )

    def _prompts(self, prompt_len: int, num_tokens: int, *, stream: bool = False) -> "Prompts":
        drawn = random.Random(prompt_len).choices(_IDS, k=prompt_len)
        body = {"model": "mock", "prompt": drawn, "max_tokens": num_tokens, "ignore_eos": True, "stream": stream}
        return Prompts(request_of(self._url, _PATH, body), prompt_len, self._bench.known_share)

    async def _full_load(
        self, prompts: "Prompts", num_connections: int, seconds: float
    ) -> tuple[int, int, float, dict[str, float]]:
        """Every connection asks as soon as it is answered: replies, tokens of streams, time, and cores."""
        connections = [await Connection.open(self._url) for _ in range(num_connections)]
        begun, started_s = self._cpu_s(), time.monotonic()
        end_s = started_s + seconds

        async def ask(connection: Connection) -> int:
            for count in itertools.count():
                if time.monotonic() >= end_s:
                    return count
                await connection.ask(prompts.draw())
            raise AssertionError("counting never ends")

        counts = await asyncio.gather(*map(ask, connections))
        duration_s = time.monotonic() - started_s
        cores = self._cores(begun, duration_s)
        for connection in connections:
            connection.close()
        return sum(counts), sum(connection.num_tokens for connection in connections), duration_s, cores

    async def _half_load(self, prompts: "Prompts", rate: float, url: str) -> tuple[Quantiles, dict[str, float]]:
        """Arrivals at random times, with this mean rate: from each arrival to its answer, and cores."""
        idle: asyncio.Queue[Connection] = asyncio.Queue()
        connections = [await Connection.open(url) for _ in range(4 * self._bench.num_connections)]
        for connection in connections:
            await connection.ask(prompts.draw())  # a hundred that are accepted at once would be a queue by themselves
            idle.put_nowait(connection)
        took_s: list[float] = []

        async def ask(due_s: float) -> None:
            connection = await idle.get()
            await connection.ask(prompts.draw())
            took_s.append(time.monotonic() - due_s)
            idle.put_nowait(connection)

        loop, now_s, begun = asyncio.get_running_loop(), time.monotonic(), self._cpu_s()
        async with asyncio.TaskGroup() as group:

            def begin(due_s: float) -> None:
                loop.call_soon_threadsafe(lambda: group.create_task(ask(due_s)))

            await asyncio.to_thread(_arrive, rate, self._bench.seconds, begin)
        cores = self._cores(begun, time.monotonic() - now_s)
        for connection in connections:
            connection.close()
        quantiles = quantiles_ms(took_s)
        assert quantiles is not None, "there were requests"
        return quantiles, cores

    def _cores(self, begun: dict[str, float], duration_s: float) -> dict[str, float]:
        ended = self._cpu_s()
        return {name: round((ended[name] - begun[name]) / duration_s, 2) for name in begun}

    def _cpu_s(self) -> dict[str, float]:
        return {"clients": time.process_time()} | {name: self._call(name, "cpu_s") for name in self._processes}

    def _call(self, name: str, method: str, *args: Any) -> Any:
        self._processes[name].call(method, *args)
        return self._processes[name].result()


def _arrive(rate: float, seconds: float, begin: Callable[[float], None]) -> None:
    """Begin at random times, which a thread can keep: an event loop's clock ticks in milliseconds, and makes crowds."""
    rng, due_s = random.Random(0), time.monotonic()
    end_s = due_s + seconds
    while (due_s := due_s + rng.expovariate(rate)) < end_s:
        if (wait_s := due_s - time.monotonic()) > 0:
            time.sleep(wait_s)
        begin(time.monotonic())


class Prompts:
    """Requests of one length, of which some ask the same and the others what nobody asked before."""

    def __init__(self, request: bytes, prompt_len: int, known_share: float) -> None:
        self._request = request
        self._num_varied = min(prompt_len, _NUM_VARIED)
        self._start = request.index(b'"prompt":[') + len(b'"prompt":[')
        self._end = self._start + (_ID_LEN + 1) * self._num_varied - 1
        self._known_share = known_share
        self._random = random.Random(prompt_len)

    def draw(self) -> bytes:
        """The next request."""
        if self._random.random() < self._known_share:
            return self._request
        first_ids = ",".join(map(str, self._random.choices(_IDS, k=self._num_varied)))
        return self._request[: self._start] + first_ids.encode() + self._request[self._end :]


def run_router_bench(bench: RouterBench) -> Iterator[RouterResult]:
    """A result for every length of prompts."""
    run = RouterRun(bench)
    try:
        for prompt_len in bench.prompt_lens:
            yield uvloop.run(run.measure(prompt_len))
    finally:
        run.close()
