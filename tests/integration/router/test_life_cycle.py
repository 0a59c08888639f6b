"""Starting, draining and stopping the router."""

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.launch.services import follow_router
from cluster.launch.tools import send
from cluster.spec.errors import UserError
from cluster.spec.ids import Incarnation
from cluster.spec.messages import Drain
from cluster.spec.worker_spec import Rendezvous
from router.server import RouterServer, _listen
from tests.fakes.bootstrap import FakeTable
from tests.fakes.router_cluster import MODEL, RouterCluster, config_of, make_server, run_cluster
from tests.fakes.waits import wait_until

pytestmark = pytest.mark.integration


class TestLifeCycle:
    def test_port_taken(self, folder: Path, shared: RouterCluster) -> None:
        port = int(shared.url.rsplit(":", 1)[1])
        server = make_server(folder, FakeTable(), port=port)
        with pytest.raises(UserError, match=rf"router\.port: 127\.0\.0\.1:{port} is taken by another process"):
            server.start()

    def test_processes_of_one_router_can_bind_the_port_at_the_same_time(self) -> None:
        with closing(_listen("127.0.0.1", 0, is_shared=True)) as first, ThreadPoolExecutor(4) as threads:
            port = first.getsockname()[1]
            for listener in threads.map(lambda _: _listen("127.0.0.1", port, is_shared=True), range(4)):
                listener.close()
        with closing(socket.create_server(("127.0.0.1", port))), pytest.raises(UserError, match="is taken by another"):
            _listen("127.0.0.1", port, is_shared=True)

    def test_not_ready_before_the_table_is_known(self, folder: Path) -> None:
        server = make_server(folder, FakeTable())
        url = server.start()
        try:
            reply = httpx.get(f"{url}/ready", timeout=60, trust_env=False)
            assert reply.json()["error"]["message"] == "the bootstrap service has not answered yet"
        finally:
            server.stop()

    def test_drain_waits_for_open_requests_and_refuses_new_ones(self, cluster: RouterCluster) -> None:
        cluster.decode.flow.clear()
        with cluster.http.stream(
            "POST", "/v1/completions", json={"model": MODEL, "prompt": "x", "stream": True}
        ) as reply:
            send([cluster.server.address], Drain())
            wait_until(lambda: cluster.http.get("/ready").status_code == 503)
            refused = cluster.post("/v1/completions", prompt="x")
            assert (refused.status_code, "draining" in refused.text) == (503, True)
            cluster.decode.flow.set()
            assert "data: [DONE]" in list(reply.iter_lines())
        assert cluster.server.run()

    def test_a_drain_ends_in_time(self, folder: Path) -> None:
        for cluster in run_cluster(folder, drain_s=0.05):
            cluster.decode.flow.clear()
            with cluster.http.stream(
                "POST", "/v1/completions", json={"model": MODEL, "prompt": "x", "stream": True}
            ) as reply:
                send([cluster.server.address], Drain())
                assert not cluster.server.run()
                assert "the router is stopping" in reply.read().decode()

    def test_the_driver_sees_it_while_it_answers(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("cluster.launch.services.LEASE_S", 1.0)
        monkeypatch.setattr("cluster.launch.services.HEARTBEAT_S", 0.05)
        server, seen = make_server(folder, FakeTable()), list[bool]()
        server.start()

        def on_seen(answers: bool) -> None:
            seen.append(answers)
            server.stop()
            if len(seen) == 3:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            follow_router(lambda: server.address, "127.0.0.1", None, on_seen)
        assert seen == [True, False, False]

    def test_stop_ends_open_streams_with_an_error(self, cluster: RouterCluster) -> None:
        cluster.decode.flow.clear()
        with cluster.http.stream(
            "POST", "/v1/completions", json={"model": MODEL, "prompt": "x", "stream": True}
        ) as reply:
            lines = reply.iter_lines()
            assert next(lines) == ""
            cluster.server.stop()
            assert "the router is stopping" in "".join(lines)
        cluster.decode.wait_cancels(1)
        cluster.prefill.wait_cancels(1)

    def test_an_error_of_the_watch_ends_the_router(self, folder: Path) -> None:
        async def broken(url: str, token: str, _: object) -> Any:
            raise PermissionError(f"{url} refuses {token}")
            yield

        rendezvous = Rendezvous(bootstrap_url="http://nowhere", token="token")
        server = RouterServer(config_of(), folder, rendezvous, "127.0.0.1", Incarnation(1), watch=broken)
        server.start()
        with pytest.raises(PermissionError, match="http://nowhere refuses token"):
            server.run()
        server.stop()

    def test_a_folder_without_tokenizer(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"has no tokenizer\.json"):
            make_server(tmp_path, FakeTable())
