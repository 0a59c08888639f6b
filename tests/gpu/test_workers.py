"""Complete workers that share one GPU, as plain processes: `pytest -m gpu tests/gpu`.

Prefill hands pages of GPU memory over to decode through the host, where CP and TP ranks also exchange tensors.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from cluster.spec.config import DeployConfig
from cluster.spec.ids import Role
from cluster.spec.strategy import Collectives, StrategySetting
from tests.fakes.failing_worker import RANK
from tests.fakes.local_cluster import LocalCluster, LocalReplica
from tests.fakes.local_engine import KV_WAYS, LocalEngine, Models, asked, prompts_of
from tests.fakes.pairwise import Case, all_pairs
from tests.integration.test_engine_matrix import WORKER as WORKER
from tests.integration.test_engine_matrix import check, in_loading_order, name_of
from tests.integration.test_failing_step import check_the_error_is_reported
from workers.bench.process import WorkerProcess

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]  # a cold cache compiles every kernel

RESOURCES = {"device": "cuda", "gpus_per_worker": 0.125}
FACTORS: dict[str, list[Any]] = {
    "family": ["qwen3", "qwen3_moe", "deepseek_v3", "glm_moe_dsa"],
    "cp": [1, 2, 3],
    "strategy": list(StrategySetting),
    "kv": KV_WAYS,
    "chunk_tokens": [4096, 37],
    "lengths": [(3, 1, 2), (60,), (1, 17, 32, 50, 5)],
    "collectives": list(Collectives),
}
NUM_TOKENS = 20


def config_of(**sections: Any) -> DeployConfig:
    return DeployConfig.model_validate({"kv": {"memory_gib": 0.02}, "resources": RESOURCES} | sections)


@pytest.mark.parametrize("case", in_loading_order(all_pairs(FACTORS)), ids=name_of)
def test_tokens_equal_transformers(models: Models, engine: LocalEngine, case: Case) -> None:
    check(case | {"resources": RESOURCES}, models, engine)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [({"tp": 2, "cp": 2}, {"tp": 2}), ({"pp": 2}, {"dp": 2}), ({"ep": 2, "cp": 2}, {"ep": 2, "dp": 2})],
)
def test_tokens_equal_transformers_in_other_layouts(
    models: Models, engine: LocalEngine, prefill: dict[str, int], decode: dict[str, int]
) -> None:
    folder, prompts = models.folder("qwen3_moe"), prompts_of((1, 17, 32, 50, 5))
    config = config_of(prefill={"parallel": prefill, "chunk_tokens": 37}, decode={"parallel": decode})
    with engine.running(folder, config) as cluster:
        answers = cluster.generate(asked(prompts, NUM_TOKENS))
    oracle = models.oracle(folder, NUM_TOKENS)
    assert answers == [oracle.tokens(prompt) for prompt in prompts]


def test_a_failing_step_ends_its_replica(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RANK, "prefill 1 1")
    with closing(LocalCluster("tests.fakes.failing_worker:FailingWorker")) as cluster:
        cluster.load(config_of(prefill={"parallel": {"cp": 2}}), models.folder("qwen3"))
        check_the_error_is_reported(cluster, "got no token")


def test_workers_that_start_together_have_as_many_pages_as_those_that_start_alone(models: Models) -> None:
    config = config_of(kv={"memory_fraction": 0.2})
    alone = []
    for role in Role:
        alone += num_pages(config, [role], models.folder("qwen3"))
    assert num_pages(config, list(Role), models.folder("qwen3")) == alone


def num_pages(config: DeployConfig, roles: Sequence[Role], folder: Path) -> list[int]:
    """Start a replica of each role at the same time. Return the number of pages of each."""
    with replicas(config, roles, folder) as started, ThreadPoolExecutor(len(roles)) as threads:
        list(threads.map(LocalReplica.load, started))
        return [replica.records[0].layout.num_pages for replica in started]


@contextmanager
def replicas(config: DeployConfig, roles: Sequence[Role], folder: Path) -> Iterator[list[LocalReplica]]:
    processes = [WorkerProcess() for _ in roles]
    try:
        yield [LocalReplica(config, role, folder, [process]) for role, process in zip(roles, processes, strict=True)]
    finally:
        for process in processes:
            process.close()
