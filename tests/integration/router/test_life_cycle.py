"""Starting, draining and stopping the router."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.bootstrap.client import BootstrapClient
from cluster.bootstrap.service import BootstrapServer
from cluster.bootstrap.table import rows_digest
from cluster.spec.errors import UserError
from cluster.spec.ids import Incarnation
from cluster.spec.registry import Heartbeat, ReplicaLoad
from cluster.spec.worker_spec import Rendezvous
from router.server import RouterServer
from tests.fakes.bootstrap import FakeTable, row_of
from tests.fakes.replica import FakeReplica
from tests.fakes.router_cluster import MODEL, RouterCluster, config_of, make_server, wait_ready

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

    def test_stop_ends_open_streams_in_words(self, cluster: RouterCluster) -> None:
        cluster.decode.flow.clear()
        with cluster.http.stream(
            "POST", "/v1/completions", json={"model": MODEL, "prompt": "x", "stream": True}
        ) as reply:
            lines = reply.iter_lines()
            assert next(lines) == ": waiting"
            cluster.server.stop()
            assert "the router stops" in "".join(lines)
        cluster.decode.wait_cancels(1)
        cluster.prefill.wait_cancels(1)

    def test_an_error_of_the_watch_ends_the_router(self, folder: Path) -> None:
        async def broken(url: str, token: str) -> Any:
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


def test_with_the_real_bootstrap_service(folder: Path) -> None:
    bootstrap = BootstrapServer("127.0.0.1", 0, "secret", lease_s=30.0)
    url = bootstrap.start()
    try:
        rendezvous = Rendezvous(bootstrap_url=url, token="secret")
        server = RouterServer(config_of(), folder, rendezvous, "127.0.0.1", Incarnation(1))
        with FakeReplica("prefill-0") as prefill, FakeReplica("decode-0") as decode:
            client = BootstrapClient(url, "secret")
            for peer in (prefill.peer, decode.peer):
                row = row_of(peer)
                client.register(row)
                beat = Heartbeat(
                    replica=row.replica,
                    incarnation=row.incarnation,
                    rows_digest=rows_digest([row]),
                    load=ReplicaLoad(),
                )
                assert client.heartbeat(beat)
            client.close()
            with httpx.Client(base_url=server.start(), timeout=60, trust_env=False) as http:
                wait_ready(http)
                reply = http.post("/v1/completions", json={"model": MODEL, "prompt": "abc", "max_tokens": 3})
                assert reply.json()["choices"][0]["text"] == "abc"
            server.stop()
    finally:
        bootstrap.stop()
