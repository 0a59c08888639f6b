"""Starting, draining and stopping the router."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.spec.errors import UserError
from cluster.spec.ids import Incarnation
from cluster.spec.worker_spec import Rendezvous
from router.server import RouterServer
from tests.fakes.bootstrap import FakeTable
from tests.fakes.router_cluster import MODEL, RouterCluster, config_of, make_server

pytestmark = pytest.mark.integration


class TestLifeCycle:
    def test_port_taken(self, folder: Path, shared: RouterCluster) -> None:
        port = int(shared.url.rsplit(":", 1)[1])
        server = make_server(folder, FakeTable(), port=port)
        with pytest.raises(UserError, match=rf"router\.port: 127\.0\.0\.1:{port} is taken by another process"):
            server.start()

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
            assert not cluster.server.drain(0.05)
            refused = cluster.post("/v1/completions", prompt="x")
            assert (refused.status_code, "draining" in refused.text) == (503, True)
            cluster.decode.flow.set()
            assert "data: [DONE]" in list(reply.iter_lines())
        assert cluster.server.drain(60.0)

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
