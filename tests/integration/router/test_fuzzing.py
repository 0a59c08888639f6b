"""Every route with valid and invalid input from its schema: a valid answer or a clear error, never a 5xx."""

from collections.abc import Callable, Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import BaseSchema, checks

from router.app import create_api
from router.metrics import Metrics
from tests.fakes.model_folder import write_model_folder
from tests.fakes.router_cluster import MODEL, RouterCluster, config_of, run_cluster
from tests.integration.router.test_tool_calls import MESSAGES, TEMPLATE, TOOLS

pytestmark = pytest.mark.integration

ADMIN = {"Authorization": "Bearer the-administrator"}
ANSWER_S = 60.0
"""Longest wait for an answer. None of them computes anything."""
NUM_FIELDS = 2
"""Number of fields in addition to a valid body."""

GOOD_BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": MODEL, "prompt": "x", "max_tokens": 3},
    "/v1/chat/completions": {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "max_tokens": 3},
    "/v1/responses": {"model": MODEL, "input": "x", "max_output_tokens": 3},
    "/tokenize": {"prompt": "x"},
}

_service: Any = SimpleNamespace(config=config_of(), metrics=Metrics(), model=SimpleNamespace(max_body_bytes=1 << 20))
_document = create_api(_service).openapi()


def api(*, has_coverage: bool) -> BaseSchema:
    """Return the routes. With coverage, they include a request for every limit of every field."""
    config = schemathesis.Config.from_dict({"phases": {"coverage": {"enabled": has_coverage}}})
    return schemathesis.openapi.from_dict(_document, config=config)


def few(test: Callable[..., None]) -> Any:
    """Limit a test to as many requests as the ordinary run has time for."""
    return settings(max_examples=10, suppress_health_check=list(HealthCheck))(test)


def many(test: Callable[..., None]) -> Any:
    return pytest.mark.full(settings(max_examples=300, suppress_health_check=list(HealthCheck))(test))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterCluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATON_ADMIN_KEY", ADMIN["Authorization"].removeprefix("Bearer "))
        yield from run_cluster(write_model_folder(tmp_path_factory.mktemp("model"), template=TEMPLATE))


def check(cluster: RouterCluster, case: Any) -> None:
    response = case.call(base_url=cluster.url, headers=ADMIN, timeout=ANSWER_S)
    if case.path.startswith("/admin"):
        cluster.http.post("/admin/resume", json={}, headers=ADMIN)
    case.validate_response(
        response,
        checks=[
            checks.not_a_server_error,
            checks.status_code_conformance,
            checks.content_type_conformance,
            checks.response_schema_conformance,
        ],
    )


def check_among_valid(cluster: RouterCluster, case: Any) -> None:
    good = GOOD_BODIES[case.path]
    if isinstance(case.body, dict):
        others = ((name, value) for name, value in case.body.items() if name not in good)
        case.body = good | dict(islice(others, NUM_FIELDS))
    check(cluster, case)


@api(has_coverage=False).parametrize()
@few
def test_a_few_requests(cluster: RouterCluster, case: Any) -> None:
    check(cluster, case)


@api(has_coverage=False).include(path=list(GOOD_BODIES)).parametrize()
@few
def test_a_few_invalid_fields_among_valid_ones(cluster: RouterCluster, case: Any) -> None:
    check_among_valid(cluster, case)


@api(has_coverage=True).parametrize()
@many
def test_many_requests(cluster: RouterCluster, case: Any) -> None:
    check(cluster, case)
