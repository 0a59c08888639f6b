"""A rank that fails in the middle of a step ends its replica at once, and its error is the one that is told."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.spec.config import DeployConfig
from cluster.spec.sampling import Stopping
from cluster.spec.strategy import Collectives
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.failing_worker import RANK, REASON
from tests.fakes.local_cluster import LocalCluster, Prompt
from workers.process import RemoteError

pytestmark = pytest.mark.integration

ANSWER_S, LONGEST_S = 3.0, 20.0
"""A collective waits a minute for a rank that stands still."""


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    monkeypatch.setenv(RANK, request.param)
    cluster = LocalCluster("tests.fakes.failing_worker:FailingWorker")
    yield cluster
    for process in cluster._processes:
        process._process.kill()  # in a cluster, too, nobody waits until they have left each other
    cluster.close()


@pytest.mark.parametrize(
    ("family", "parallel", "cluster"),
    [
        ("llama", {"tp": 2}, "prefill 1 1"),
        ("llama", {"cp": 2}, "prefill 1 1"),
        ("llama", {"pp": 2}, "prefill 0 1"),
        pytest.param("llama", {"cp": 2}, "prefill 0 1", marks=pytest.mark.full),
        pytest.param("llama", {"pp": 2}, "prefill 1 1", marks=pytest.mark.full),
        pytest.param("llama", {"dp": 2}, "prefill 1 1", marks=pytest.mark.full),
        ("qwen3_moe", {"dp": 2, "ep": 2}, "prefill 1 1"),
        pytest.param("qwen3_moe", {"cp": 2, "moe_dp": 2}, "prefill 0 1", marks=pytest.mark.full),
    ],
    indirect=["cluster"],
)
def test_the_first_error_is_told_and_nobody_waits(
    cluster: LocalCluster, tmp_path: Path, family: str, parallel: dict[str, int]
) -> None:
    config = DeployConfig.model_validate({"prefill": {"parallel": parallel}, "kv": {"memory_gib": 0.01}})
    cluster.load(config, make_checkpoint(tmp_path, family))
    check_that_the_error_is_told(cluster, "got no token")


@pytest.mark.parametrize("cluster", ["decode 1 4"], indirect=True)
@pytest.mark.parametrize("collectives", Collectives)
def test_a_decode_rank_that_fails_after_some_tokens_is_told_and_nobody_waits(
    cluster: LocalCluster, tmp_path: Path, collectives: Collectives
) -> None:
    config = DeployConfig.model_validate(
        {
            "decode": {"parallel": {"tp": 2}},
            "kv": {"memory_gib": 0.01},
            "resources": {"collectives": collectives},
        }
    )
    cluster.load(config, make_checkpoint(tmp_path, "llama"))
    check_that_the_error_is_told(cluster, "2 of 2 prompts got no token")


def check_that_the_error_is_told(cluster: LocalCluster, given_up: str) -> None:
    start_s = time.monotonic()
    prompt = Prompt([5, 6, 7], Stopping(max_tokens=8))
    with (
        pytest.raises(RemoteError, match=rf"^RuntimeError: {REASON}"),
        cluster.running(),
        pytest.raises(RemoteError, match=given_up),
    ):
        cluster.generate([prompt] * 2, ANSWER_S)
    assert time.monotonic() - start_s < LONGEST_S
