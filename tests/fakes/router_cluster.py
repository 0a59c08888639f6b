"""Router over real sockets. HTTP and the channel are real, and only the replicas are fake."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from cluster.spec.config import DeployConfig, LogConfig, ModelConfig, PrefillConfig
from cluster.spec.ids import Incarnation
from cluster.spec.messages import Submit
from cluster.spec.router_config import RouterConfig
from cluster.spec.worker_spec import Rendezvous
from router.server import RouterServer
from tests.fakes.bootstrap import FakeTable, entry_of, table_of
from tests.fakes.replica import FakeReplica
from tests.fakes.waits import wait_until

MODEL = "echo"
CONTEXT = 512
CACHED_TOKENS = 4
STARTED = 1_700_000_000.0
"""Unix time at which the cluster started."""


@dataclass
class RouterCluster:
    url: str
    server: RouterServer
    table: FakeTable
    prefill: FakeReplica
    decode: FakeReplica
    http: httpx.Client

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json={"model": MODEL, **body})

    def complete(self, prompt: Any, **body: Any) -> Any:
        reply = self.post("/v1/completions", prompt=prompt, **body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def events(self, path: str, **body: Any) -> list[Any]:
        """Return the data of a stream's events, without [DONE]."""
        reply = self.post(path, stream=True, **body)
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"].startswith("text/event-stream")
        data = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
        assert data.pop() == "[DONE]"
        return [json.loads(line) for line in data]

    def metric(self, line: str) -> float:
        text = self.http.get("/metrics").text
        values = [float(found.rsplit(" ", 1)[1]) for found in text.splitlines() if found.startswith(line + " ")]
        assert len(values) == 1, f"{line}: {values} in\n{text}"
        return values[0]

    def last_submit(self) -> Submit:
        return self.decode.submits[-1]

    def assert_empty(self) -> None:
        wait_until(
            lambda: not self.metric("baton_num_requests_running") and not self.decode.num_open, "requests are left open"
        )


def config_of(limits: PrefillConfig | None = None, log: LogConfig | None = None, **router: Any) -> DeployConfig:
    return DeployConfig(
        prefill=limits or PrefillConfig(),
        log=log or LogConfig(),
        model=ModelConfig(path=f"somewhere/{MODEL}"),
        router=RouterConfig(host="127.0.0.1", **{"port": 0, **router}),
    )


def make_server(folder: Path, table: FakeTable, **router: Any) -> RouterServer:
    rendezvous = Rendezvous(bootstrap_url="http://nowhere", token="token", started=STARTED)
    return RouterServer(config_of(**router), folder, rendezvous, "127.0.0.1", Incarnation(1), watch=table.watch)


def run_cluster(folder: Path, limits: PrefillConfig | None = None, **router: Any) -> Iterator[RouterCluster]:
    table = FakeTable()
    with FakeReplica("prefill-0") as prefill, FakeReplica("decode-0", cached_tokens=CACHED_TOKENS) as decode:
        server = make_server(folder, table, limits=limits, **router)
        table.show(table_of(entry_of(prefill.peer), entry_of(decode.peer)))
        url = server.start()
        try:
            with httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
                wait_ready(http)
                yield RouterCluster(url, server, table, prefill, decode, http)
        finally:
            server.stop()
        server.run()


def wait_ready(http: httpx.Client) -> None:
    deadline_s = time.monotonic() + 60
    while http.get("/ready").status_code != 200:
        assert time.monotonic() < deadline_s, http.get("/ready").text
        time.sleep(0.01)
