"""Two router processes share a port and the limits."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from cluster.spec.config import DeployConfig, ModelConfig
from cluster.spec.env import ADMIN_KEY
from cluster.spec.router_config import RouterConfig
from cluster.spec.worker_spec import RouterShare, router_shares
from tests.fakes.bootstrap import entry_of, table_of
from tests.fakes.model_folder import write_model_folder
from tests.fakes.replica import FakeReplica
from tests.fakes.waits import wait_until
from workers.bench.process import WorkerProcess

pytestmark = pytest.mark.integration

WAIT_S = 60.0
LIMIT = 4
_ADMIN = {"authorization": "Bearer key-of-the-administrator"}


@dataclass
class Routers:
    url: str
    decode: FakeReplica
    processes: list[WorkerProcess]

    def ask(self, max_tokens: int = 2, **fields: object) -> httpx.Response:
        """Send a request with a new connection, which goes to either process."""
        body = {"model": "echo", "prompt": "hello", "max_tokens": max_tokens, **fields}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=WAIT_S, trust_env=False)

    def is_ready(self) -> bool:
        try:
            return {self.ask().status_code for _ in range(8)} == {200}
        except httpx.TransportError:  # neither listens yet
            return False


@pytest.fixture(scope="module")
def routers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routers]:
    folder = write_model_folder(tmp_path_factory.mktemp("model"), max_context=512)
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv(ADMIN_KEY.name, "key-of-the-administrator")
        prefill = stack.enter_context(FakeReplica("prefill-0"))
        decode = stack.enter_context(FakeReplica("decode-0"))
        port, processes = 0, []
        for share in router_shares(2):
            process = WorkerProcess("tests.fakes.router_host:RouterHost")
            stack.callback(process.close)
            url = start(process, folder, table_of(entry_of(prefill.peer), entry_of(decode.peer)), share, port)
            port = urlsplit(url).port or 0
            processes.append(process)
        routers = Routers(url, decode, processes)
        wait_until(routers.is_ready)
        yield routers


def start(process: WorkerProcess, folder: Path, table: object, share: RouterShare, port: int) -> str:
    config = DeployConfig(
        model=ModelConfig(path=f"{folder.parent}/echo", served_name="echo"),
        router=RouterConfig(port=port, processes=2, key_max_requests=LIMIT),
    )
    process.call("make", config, folder, table, share)
    process.result()
    process.call("start")
    return str(process.result())


def test_connections_reach_both_processes(routers: Routers) -> None:
    def has_both() -> bool:
        assert routers.ask().status_code == 200
        return {submit.router.replica for submit in routers.decode.submits} == {"router", "router-1"}

    wait_until(has_both)


def test_each_has_its_share_of_a_keys_limit(routers: Routers) -> None:
    routers.decode.flow.clear()
    replies: list[httpx.Response] = []
    threads = [threading.Thread(target=lambda: replies.append(routers.ask())) for _ in range(8 * LIMIT)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(replies) + routers.decode.num_open == len(threads))
    assert routers.decode.num_open == LIMIT
    routers.decode.flow.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert Counter(reply.status_code for reply in replies) == {200: LIMIT, 429: 7 * LIMIT}


def test_one_cannot_drain_the_others(routers: Routers) -> None:
    reply = httpx.post(f"{routers.url}/admin/drain", json={}, headers=_ADMIN, timeout=WAIT_S, trust_env=False)
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "refused")
    assert {routers.ask().status_code for _ in range(12)} == {200}


def test_a_connection_that_asked_for_a_trace_gets_it(routers: Routers) -> None:
    body = {"model": "echo", "prompt": "hello", "max_tokens": 2, "trace": True}
    with httpx.Client(base_url=routers.url, timeout=WAIT_S, trust_env=False) as http:
        path = http.post("/v1/completions", json=body).headers["x-baton-trace"]
        assert http.get(path).status_code == 200
    codes = set[int]()

    def has_both() -> bool:
        codes.add(httpx.get(f"{routers.url}{path}", timeout=WAIT_S, trust_env=False).status_code)
        return len(codes) == 2

    wait_until(has_both)
    assert codes == {200, 404}


def test_when_one_ends_the_other_continues(routers: Routers) -> None:
    routers.processes[1].close()
    assert {routers.ask().status_code for _ in range(12)} == {200}
