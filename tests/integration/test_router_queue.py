"""What the router says when too many prompt tokens wait, and the priority it passes on. Replicas are fake."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from cluster.spec.config import DeployConfig, ModelConfig, PrefillConfig, RouterConfig
from cluster.spec.ids import Incarnation
from cluster.spec.worker_spec import Rendezvous
from router.server import RouterServer
from tests.fakes.bootstrap import FakeTable, entry_of, table_of
from tests.fakes.model_folder import BOS, write_model_folder
from tests.fakes.replica import FakeReplica

pytestmark = pytest.mark.integration

MODEL = "echo"
LIMIT = 20
WAIT_S = 60


class Endpoint:
    """A router that lets ``LIMIT`` prompt tokens wait at its one prefill replica."""

    def __init__(self, http: httpx.Client, decode: FakeReplica) -> None:
        self.http = http
        self.decode = decode

    def post(self, prompt: Any, **body: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"model": MODEL, "prompt": prompt, "max_tokens": 4, **body})

    def wait_open(self, count: int) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while self.decode.num_open != count:
            assert time.monotonic() < deadline_s, f"{self.decode.num_open} requests are open, not {count}"
            time.sleep(0.01)


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    folder = write_model_folder(tmp_path_factory.mktemp("model"), max_context=512)
    config = DeployConfig(
        model=ModelConfig(path=f"somewhere/{MODEL}"),
        router=RouterConfig(port=0, max_waiting_requests=0),
        prefill=PrefillConfig(max_queued_tokens=LIMIT),
    )
    table = FakeTable()
    with FakeReplica("prefill-0") as prefill, FakeReplica("decode-0") as decode:
        rendezvous = Rendezvous(bootstrap_url="http://nowhere", token="token")
        server = RouterServer(config, folder, rendezvous, "127.0.0.1", Incarnation(1), watch=table.watch)
        table.show(table_of(entry_of(prefill.peer), entry_of(decode.peer)))
        try:
            with httpx.Client(base_url=server.start(), timeout=WAIT_S, trust_env=False) as http:
                deadline_s = time.monotonic() + WAIT_S
                while http.get("/ready").status_code != 200:
                    assert time.monotonic() < deadline_s
                    time.sleep(0.01)
                yield Endpoint(http, decode)
        finally:
            server.stop()
        server.run()


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_said_with_429_and_takes_requests_again(endpoint: Endpoint, stream: bool) -> None:
    endpoint.decode.flow.clear()
    replies: list[httpx.Response] = []
    # One with nothing before it is taken, although it is longer than the limit.
    first = threading.Thread(target=lambda: replies.append(endpoint.post([BOS] + [97] * LIMIT)))
    first.start()
    endpoint.wait_open(1)
    num_submits = len(endpoint.decode.submits)
    refused = endpoint.post("hello", stream=stream)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
    assert error["message"] == (
        f"the queue is full: {LIMIT} prompt tokens or more (prefill.max_queued_tokens) wait at every prefill replica; "
        "try again later"
    )
    assert len(endpoint.decode.submits) == num_submits
    endpoint.decode.flow.set()
    first.join(WAIT_S)
    assert [reply.status_code for reply in replies] == [200]
    assert endpoint.post("hello", stream=stream).status_code == 200


def test_the_priority_reaches_the_replicas(endpoint: Endpoint) -> None:
    for body, priority in (({}, 0), ({"priority": None}, 0), ({"priority": -3}, -3)):
        assert endpoint.post("hello", **body).status_code == 200
        assert endpoint.decode.submits[-1].priority == priority


@pytest.mark.parametrize("priority", ["high", 1.5, True, 2**31])
def test_a_priority_that_is_no_whole_number_is_refused(endpoint: Endpoint, priority: Any) -> None:
    reply = endpoint.post("hello", priority=priority)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "priority"
