"""Speed of one router process, with an empty FastAPI app for comparison.

    python -m tests.bench.router [--prompt-len 32 8192] [--seconds 5] [--connections 32]

The router, the replicas, the clients and the app each have one process. The replicas compute nothing. Prints one JSON
object per prompt length: throughput and CPU time per request and per streamed token at full load, and the latency added
at half load to that of a server without work. On a shared machine compare CPU times, which include those of ZeroMQ's
threads on other cores.
"""

import argparse
import json
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from typing import Any

import httpx
import uvloop

from cluster.channel import Inbox, Outbox
from cluster.spec.config import DeployConfig, ModelConfig
from cluster.spec.errors import PeerUnreachableError
from cluster.spec.ids import Incarnation, Role, Room, replica_id
from cluster.spec.messages import Cancel, KvEvents, Message, Output, Submit, SubscribeKvEvents
from cluster.spec.registry import TableSnapshot
from cluster.spec.router_config import RouterConfig
from cluster.spec.sampling import FinishReason
from cluster.spec.step_messages import Shutdown
from tests.bench.http_load import full_load, random_load, request_of
from tests.fakes.bootstrap import entry_of, peer_of, table_of
from workers.bench.process import WorkerProcess
from workers.models.resolve import DESCRIPTION, resolve_model

STREAM_LEN = 256
_HOST = "127.0.0.1"
_IDLE_S = 0.05
_WARM_UP_S = 1.0
_GOAL_PER_S = 3000
"""Number of requests per second that one process is to handle."""

Figures = dict[str, float]


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
            outbox.send(self._inbox.address, Shutdown())
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


def measure_full(
    server: WorkerProcess, url: str, prompt_len: int, num_tokens: int, args: argparse.Namespace
) -> Figures:
    """Measure one-token answers or streams at full load. Figures are per token of a stream."""
    request, what = request_of(url, prompt_len, num_tokens), "token" if num_tokens > 1 else "request"
    uvloop.run(full_load(url, request, args.connections, min(_WARM_UP_S, args.seconds)))
    before_s = call(server, "cpu_s")
    count, duration_s = uvloop.run(full_load(url, request, args.connections, args.seconds))
    cpu_s = call(server, "cpu_s") - before_s
    return {
        f"{what}s_per_s": round(count * num_tokens / duration_s, 1),
        f"cpu_us_per_{what}": round(cpu_s / (count * num_tokens) * 1e6, 2),
        f"cores_of_{what}s": round(cpu_s / duration_s, 3),
    }


def measure_added(url: str, direct_url: str, prompt_len: int, per_s: float, args: argparse.Namespace) -> Figures:
    """Measure the latency of requests that arrive at random times, minus that of answers without work."""
    request = request_of(url, prompt_len, 1)
    begin = partial(random_load, request=request, per_s=per_s, num_connections=args.connections, seconds=args.seconds)
    served, direct = uvloop.run(begin(url)), uvloop.run(begin(direct_url))
    return {"per_s": per_s} | {
        f"added_p{percent}_ms": round((_percentile(served, percent) - _percentile(direct, percent)) * 1e3, 2)
        for percent in (50, 99)
    }


def _percentile(values: Sequence[float], percent: int) -> float:
    """Return a percentile of sorted values."""
    return values[len(values) * percent // 100]


def measure(
    server: WorkerProcess, url: str, direct_url: str, prompt_len: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Measure one-token answers: full load, half of the goal, and half of what was reached."""
    full = measure_full(server, url, prompt_len, 1, args)
    halves = {"half_goal": _GOAL_PER_S / 2, "half_load": round(full["requests_per_s"] / 2)}
    return full | {what: measure_added(url, direct_url, prompt_len, per_s, args) for what, per_s in halves.items()}


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
        closing(WorkerProcess("tests.bench.baselines:EmptyFastApi")) as fastapi,
        closing(WorkerProcess("tests.bench.baselines:Answerer")) as answerer,
    ):
        for process in (replicas, fastapi, answerer):
            call(process, "make")
        call(router, "make", config, folder, call(replicas, "start"))
        url, fastapi_url, direct_url = (call(process, "start") for process in (router, fastapi, answerer))
        while httpx.get(f"{url}/ready").status_code != httpx.codes.OK:
            time.sleep(_IDLE_S)
        for prompt_len in args.prompt_len:
            ours = measure(router, url, direct_url, prompt_len, args)
            ours |= measure_full(router, url, prompt_len, STREAM_LEN, args)
            empty = measure(fastapi, fastapi_url, direct_url, prompt_len, args)
            print(json.dumps({"prompt_len": prompt_len, "router": ours, "fastapi": empty}), flush=True)


if __name__ == "__main__":
    main()
