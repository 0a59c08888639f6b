"""A rank that fails while it loads or computes ends its replica at once, and its error is reported."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.spec.config import DeployConfig
from cluster.spec.ids import Role
from cluster.spec.sampling import Stopping
from cluster.spec.strategy import Collectives
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.failing_worker import RANK, REASON
from tests.fakes.local_cluster import LocalCluster, LocalReplica, Prompt
from tests.fakes.local_engine import Models
from workers.bench.process import RemoteError, WorkerProcess

pytestmark = pytest.mark.integration

ANSWER_S, LONGEST_S = 1.0, 20.0
"""Limits in seconds. A collective waits a minute for a rank that hangs."""
DAMAGED = r"^CheckpointError: .*model.safetensors is damaged"
UNREADABLE = r"^UnsupportedModelError: .*config.json"


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    monkeypatch.setenv(RANK, request.param)
    cluster = LocalCluster("tests.fakes.failing_worker:FailingWorker")
    yield cluster
    for process in cluster._processes:
        process._process.kill()  # in a cluster, too, nobody waits for them to leave each other's groups
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
def test_the_first_error_is_reported_without_waiting(
    cluster: LocalCluster, tmp_path: Path, family: str, parallel: dict[str, int]
) -> None:
    config = DeployConfig.model_validate({"prefill": {"parallel": parallel}, "kv": {"memory_gib": 0.01}})
    cluster.load(config, make_checkpoint(tmp_path, family))
    check_the_error_is_reported(cluster, "got no token")


@pytest.mark.parametrize("cluster", ["decode 1 4"], indirect=True)
@pytest.mark.parametrize("collectives", Collectives)
def test_a_decode_rank_that_fails_after_some_tokens_is_reported_without_waiting(
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
    check_the_error_is_reported(cluster, "2 of 2 prompts got no token")


@pytest.mark.parametrize("cluster", ["prefill 1 1"], indirect=True)
@pytest.mark.parametrize("collectives", Collectives)
def test_a_rank_that_fails_while_projections_are_sent_is_reported_without_waiting(
    cluster: LocalCluster, tmp_path: Path, collectives: Collectives
) -> None:
    config = DeployConfig.model_validate(
        {
            "prefill": {"parallel": {"cp": 2}, "shard_linear": "broadcast"},
            "kv": {"memory_gib": 0.01},
            "resources": {"collectives": collectives},
        }
    )
    cluster.load(config, make_checkpoint(tmp_path, "llama"))
    check_the_error_is_reported(cluster, "got no token")


def check_the_error_is_reported(cluster: LocalCluster, given_up: str) -> None:
    start_s = time.monotonic()
    prompt = Prompt([5, 6, 7], Stopping(max_tokens=8))
    with (
        pytest.raises(RemoteError, match=rf"^RuntimeError: {REASON}"),
        cluster.running(),
        pytest.raises(RemoteError, match=given_up),
    ):
        cluster.generate([prompt] * 2, ANSWER_S)
    assert time.monotonic() - start_s < LONGEST_S


@pytest.mark.parametrize(
    ("parallel", "rank", "damaged", "error"),
    [
        ({"tp": 2}, 1, "model.safetensors", DAMAGED),
        ({"pp": 2}, 0, "model.safetensors", DAMAGED),
        pytest.param({"pp": 2}, 1, "model.safetensors", DAMAGED, marks=pytest.mark.full),
        pytest.param({"dp": 2}, 1, "model.safetensors", DAMAGED, marks=pytest.mark.full),
        ({"tp": 2}, 1, "config.json", UNREADABLE),
        pytest.param({"tp": 2}, 0, "config.json", UNREADABLE, marks=pytest.mark.full),
    ],
)
def test_the_rank_that_fails_to_load_is_named_and_no_rank_waits_for_it(
    models: Models, tmp_path: Path, parallel: dict[str, int], rank: int, damaged: str, error: str
) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    if damaged == "config.json":
        (folder / damaged).unlink()
    else:
        (folder / damaged).write_bytes(b"not tensors")
    config = DeployConfig.model_validate({"prefill": {"parallel": parallel}, "kv": {"memory_gib": 0.01}})
    processes = [WorkerProcess() for _ in range(2)]
    try:
        replica = LocalReplica(config, Role.PREFILL, models.folder("llama"), processes)
        replica.workers[rank].call("make", replica.specs[rank], folder, None)
        replica.workers[rank].result()
        with pytest.raises(RemoteError, match=error):
            replica.load()
    finally:
        for process in processes:
            process.close()
