"""X-data-parallel-rank over HTTP: what a client asks for reaches the leaders on every route, or is refused."""

from typing import Any

import pytest

from tests.fakes.router_cluster import MODEL, RouterCluster

pytestmark = pytest.mark.integration
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"input": "x"},
}


@pytest.mark.parametrize("path", BODIES)
def test_a_rank_that_is_there_reaches_the_leaders(shared: RouterCluster, path: str) -> None:
    reply = shared.http.post(path, json={"model": MODEL, **BODIES[path]}, headers={"X-data-parallel-rank": "0"})
    assert reply.status_code == 200, reply.text
    assert shared.last_submit().dp_rank == 0
    assert shared.post(path, **BODIES[path]).status_code == 200
    assert shared.last_submit().dp_rank is None
    reply = shared.http.post(path, json={"model": MODEL, **BODIES[path]}, headers={"X-data-parallel-rank": "1"})
    assert reply.json()["error"]["message"] == "X-data-parallel-rank: got '1'; allowed: 0 to 0"


@pytest.mark.parametrize("path", BODIES)
def test_a_field_of_the_body_asks_for_it_too(shared: RouterCluster, path: str) -> None:
    assert shared.post(path, routed_dp_rank=0, **BODIES[path]).status_code == 200
    assert shared.last_submit().dp_rank == 0
    reply = shared.post(path, routed_dp_rank=1, **BODIES[path])
    assert reply.json()["error"]["message"] == "routed_dp_rank: got 1; allowed: 0 to 0"
