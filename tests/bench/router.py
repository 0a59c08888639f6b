"""Throughput of one router process, and its CPU time per request and per streamed token.

    python -m tests.bench.router [--prompt-len 32 8192] [--seconds 5] [--connections 32]

The router, the replicas and the clients each have one process. The replicas compute nothing. Prints one JSON object per
prompt length. On a shared machine compare CPU times: the router's capacity is 1 s / CPU time.
"""

import argparse
import asyncio
import itertools
import json
import random
import threading
import time
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

import httpx
import uvloop

from cluster.channel import Inbox, Outbox
from cluster.spec.config import DeployConfig, ModelConfig, RouterConfig
from cluster.spec.errors import PeerUnreachableError
from cluster.spec.ids import Incarnation, Role, Room, replica_id
from cluster.spec.messages import Cancel, KvEvents, Message, Output, Submit, SubscribeKvEvents
from cluster.spec.registry import TableSnapshot
from cluster.spec.sampling import FinishReason
from cluster.spec.step_messages import Shutdown
from tests.fakes.bootstrap import entry_of, peer_of, table_of
from workers.bench.process import WorkerProcess
from workers.models.resolve import DESCRIPTION, resolve_model

STREAM_LEN = 256
_HOST = "127.0.0.1"
_IDLE_S = 0.05
_WARM_UP_S = 1.0


class MockReplicas:
    """Prefill replica and decode replica that share an inbox and answer as fast as the router accepts tokens."""

    def __init__(self) -> None:
        self._inbox, self._outbox = Inbox(_HOST), Outbox()
        self._open: dict[Room, tuple[Submit, int]] = {}
        """Unfinished requests, with the number of tokens sent."""
        self._seen_once: set[Room] = set()
        """Requests for which only one of both messages has arrived."""
        self._thread = threading.Thread(target=self._run, name="mock-replicas")

    def start(self) -> TableSnapshot:
        """Answer in a thread. Return the replicas' rank table."""
        self._thread.start()
        return table_of(*(entry_of(peer_of(replica_id(role, 0), address=self._inbox.address)) for role in Role))

    def close(self) -> None:
        with closing(Outbox()) as outbox:
            outbox.send(self._inbox.address, Shutdown(reason="the measurement is over"))
            self._thread.join()
        self._inbox.close()
        self._outbox.close()

    def _run(self) -> None:
        is_running = True
        while is_running:
            for message in self._inbox.receive(0.0 if self._open else _IDLE_S):
                is_running = is_running and self._take(message)
            for submit, num_sent in list(self._open.values()):
                self._send_token(submit, num_sent)

    def _take(self, message: Message) -> bool:
        match message:
            case Submit() if message.room in self._seen_once:
                self._seen_once.remove(message.room)
            case Submit():
                self._seen_once.add(message.room)
                self._open[message.room] = message, 0
            case Cancel():
                self._open.pop(message.room, None)
            case SubscribeKvEvents():
                prefill = replica_id(Role.PREFILL, 0)
                news = KvEvents(replica=prefill, incarnation=Incarnation(1), number=0, stored=[], removed=[])
                self._outbox.send(message.router.address, news)
        return not isinstance(message, Shutdown)

    def _send_token(self, submit: Submit, num_sent: int) -> None:
        is_last = num_sent + 1 == submit.stopping.max_tokens
        output = Output(
            room=submit.room,
            replica=submit.decode.replica,
            incarnation=submit.decode.incarnation,
            first_index=num_sent,
            token_ids=[300],
            finish=FinishReason.LENGTH if is_last else None,
        )
        try:
            self._outbox.send(submit.router.address, output)
        except PeerUnreachableError:  # the router's queue is full
            time.sleep(0.001)
            return
        if is_last:
            del self._open[submit.room]
        else:
            self._open[submit.room] = submit, num_sent + 1


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> None:
    """Send a prepared request and read its complete answer. httpx would take more CPU time than the router."""
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    assert head.startswith(b"http/1.1 200"), head
    if b"content-length: " in head:
        await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0]))
    else:
        while not (await reader.readuntil(b"\r\n")).startswith(b"0\r\n"):
            pass
        await reader.readexactly(2)


async def full_load(url: str, request: bytes, num_connections: int, seconds: float) -> tuple[int, float]:
    """Keep every connection busy. Return the number of answers and the time."""
    at, start_s = urlsplit(url), time.monotonic()

    async def client() -> int:
        reader, writer = await asyncio.open_connection(at.hostname, at.port, limit=1 << 20)
        for count in itertools.count():
            if time.monotonic() >= start_s + seconds:
                writer.close()
                return count
            await ask(reader, writer, request)
        raise AssertionError("counting never ends")

    counts = await asyncio.gather(*(client() for _ in range(num_connections)))
    return sum(counts), time.monotonic() - start_s


def request_of(url: str, prompt_len: int, num_tokens: int) -> bytes:
    prompt = random.Random(prompt_len).choices(range(300, 1000), k=prompt_len)
    body = {"model": "mock", "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "stream": num_tokens > 1}
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def measure(router: WorkerProcess, url: str, prompt_len: int, args: argparse.Namespace) -> dict[str, float]:
    """Measure one-token answers, then streams."""
    figures: dict[str, float] = {"prompt_len": prompt_len}
    for what, num_tokens in (("request", 1), ("token", STREAM_LEN)):
        request = request_of(url, prompt_len, num_tokens)
        uvloop.run(full_load(url, request, args.connections, min(_WARM_UP_S, args.seconds)))
        before_s = call(router, "cpu_s")
        count, duration_s = uvloop.run(full_load(url, request, args.connections, args.seconds))
        cpu_s = call(router, "cpu_s") - before_s
        figures[f"{what}s_per_s"] = round(count * num_tokens / duration_s, 1)
        figures[f"router_cpu_us_per_{what}"] = round(cpu_s / (count * num_tokens) * 1e6, 2)
        figures[f"router_cores_of_{what}s"] = round(cpu_s / duration_s, 3)
    return figures


def call(process: WorkerProcess, method: str, *args: Any) -> Any:
    process.call(method, *args)
    return process.result()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompt-len", type=int, nargs="+", default=[32, 8192], help="token ids of a prompt")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--connections", type=int, default=32, help="requests in flight")
    args = parser.parse_args()
    folder = resolve_model("recall", DESCRIPTION)
    config = DeployConfig(model=ModelConfig(path=str(folder), served_name="mock"), router=RouterConfig(port=0))
    with (
        closing(WorkerProcess("tests.bench.router:MockReplicas")) as replicas,
        closing(WorkerProcess("tests.fakes.router_host:RouterHost")) as router,
    ):
        call(replicas, "make")
        call(router, "make", config, folder, call(replicas, "start"))
        url: str = call(router, "start")
        while httpx.get(f"{url}/ready").status_code != httpx.codes.OK:
            time.sleep(_IDLE_S)
        for prompt_len in args.prompt_len:
            print(json.dumps(measure(router, url, prompt_len, args)), flush=True)


if __name__ == "__main__":
    main()
