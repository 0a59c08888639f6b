"""Two router processes share a port: a client cannot tell them from one."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from cluster.spec.config import DeployConfig, ModelConfig, RouterConfig
from cluster.spec.env import ADMIN_KEY
from cluster.spec.ids import router_names
from cluster.spec.worker_spec import RouterShare
from tests.fakes.bootstrap import entry_of, table_of
from tests.fakes.model_folder import write_model_folder
from tests.fakes.replica import FakeReplica
from workers.worker_process import WorkerProcess

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
        """Over a connection of its own, which goes to either process."""
        body = {"model": "echo", "prompt": "hello", "max_tokens": max_tokens, **fields}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=WAIT_S, trust_env=False)

    def metric(self, line: str) -> float:
        text = httpx.get(f"{self.url}/metrics", timeout=WAIT_S, trust_env=False).text
        return float(next(found for found in text.splitlines() if found.startswith(f"{line} ")).rsplit(" ", 1)[1])

    def order(self, path: str) -> None:
        reply = httpx.post(f"{self.url}/admin/{path}", json={}, headers=_ADMIN, timeout=WAIT_S, trust_env=False)
        assert reply.status_code == 200, reply.text

    def is_ready(self) -> bool:
        try:
            return {self.ask().status_code for _ in range(8)} == {200}
        except httpx.TransportError:  # neither listens yet
            return False


def wait_until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, "waited too long"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def routers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routers]:
    folder = write_model_folder(tmp_path_factory.mktemp("model"), max_context=512)
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv(ADMIN_KEY.name, "key-of-the-administrator")
        prefill = stack.enter_context(FakeReplica("prefill-0"))
        decode = stack.enter_context(FakeReplica("decode-0"))
        descriptor = os.memfd_create("board")
        stack.callback(os.close, descriptor)
        port, processes = 0, []
        for index, name in enumerate(router_names(2)):
            process = WorkerProcess("cluster.bench.router_host:RouterHost")
            stack.callback(process.close)
            place = RouterShare(name=name, index=index, num_processes=2, board=f"/proc/{os.getpid()}/fd/{descriptor}")
            url = start(process, folder, table_of(entry_of(prefill.peer), entry_of(decode.peer)), place, port)
            port = urlsplit(url).port or 0
            processes.append(process)
        routers = Routers(url, decode, processes)
        wait_until(routers.is_ready)
        yield routers


def start(process: WorkerProcess, folder: Path, table: object, place: RouterShare, port: int) -> str:
    config = DeployConfig(
        model=ModelConfig(path=f"{folder.parent}/echo", served_name="echo"),
        router=RouterConfig(port=port, processes=2, key_max_requests=LIMIT),
    )
    process.call("make", config, folder, table, place)
    process.result()
    process.call("start")
    return str(process.result())


def test_connections_go_to_both(routers: Routers) -> None:
    def has_both() -> bool:
        assert routers.ask().status_code == 200
        return {submit.router.replica for submit in routers.decode.submits} == {"router", "router-1"}

    wait_until(has_both)


def test_limits_of_a_key_hold_over_both(routers: Routers) -> None:
    routers.decode.flow.clear()
    replies: list[httpx.Response] = []
    threads = []

    def is_there(num_open: int, num_replies: int) -> bool:
        return routers.decode.num_open == num_open or len(replies) > num_replies

    for number in range(3 * LIMIT):
        threads.append(thread := threading.Thread(target=lambda: replies.append(routers.ask())))
        num_replies = len(replies)
        thread.start()
        wait_until(partial(is_there, number + 1, num_replies))
    assert routers.decode.num_open == LIMIT
    routers.decode.flow.set()
    for thread in threads:
        thread.join(WAIT_S)
    codes = sorted(reply.status_code for reply in replies)
    assert codes == [200] * LIMIT + [429] * 2 * LIMIT


def test_figures_are_those_of_both(routers: Routers) -> None:
    before = routers.metric('baton_request_success_total{finished_reason="length"}')
    for _ in range(12):
        assert routers.ask().status_code == 200
    line = 'baton_request_success_total{finished_reason="length"}'
    for _ in range(8):
        wait_until(lambda: routers.metric(line) >= before + 12)
    wait_until(lambda: routers.metric("baton_num_requests_running") == 0)


def test_an_order_holds_for_both(routers: Routers) -> None:
    routers.order("drain")
    assert {routers.ask().status_code for _ in range(12)} == {503}
    routers.order("resume")
    assert {routers.ask().status_code for _ in range(12)} == {200}


def test_either_gives_the_timelines_of_both(routers: Routers) -> None:
    for _ in range(4):
        path = routers.ask(timeline=True).headers["x-baton-timeline"]
        replies = [httpx.get(f"{routers.url}{path}", timeout=WAIT_S, trust_env=False) for _ in range(8)]
        assert {reply.status_code for reply in replies} == {200}
        traces = [reply.json() for reply in replies]
        assert all(trace == traces[0] for trace in traces)
        assert traces[0]["otherData"]["ranks that did not answer"] == []
    reply = httpx.get(f"{routers.url}/timelines/7", timeout=WAIT_S, trust_env=False)
    assert reply.status_code == 404


def test_when_one_ends_the_other_goes_on(routers: Routers) -> None:
    paths: dict[str, str] = {}
    while len(paths) < 2:
        path = routers.ask(timeline=True).headers["x-baton-timeline"]
        paths[routers.decode.submits[-1].router.replica] = path
    routers.processes[1].close()
    assert {routers.ask().status_code for _ in range(12)} == {200}
    replies = {name: httpx.get(f"{routers.url}{path}", timeout=10, trust_env=False) for name, path in paths.items()}
    assert {name: reply.status_code for name, reply in replies.items()} == {"router": 200, "router-1": 404}
