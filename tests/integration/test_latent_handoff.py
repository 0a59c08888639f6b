"""A handoff of a model with latent attention moves one copy of its latents, although all TP ranks hold them."""

import pytest

from cluster.spec.config import DeployConfig
from cluster.spec.ids import Role
from cluster.spec.kv import pages_for
from cluster.spec.registry import TransferMode
from tests.fakes.local_engine import LocalEngine, Models, asked, prompts_of
from workers.models.registry import read_model_config

pytestmark = pytest.mark.integration

WORKER = "tests.fakes.load_reporting_worker:LoadReportingWorker"
PAGE_SIZE = 16
LENGTHS = (90, 33, 5)


@pytest.mark.parametrize("mode", TransferMode)
@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32"])
def test_four_ranks_on_both_sides_move_one_copy(
    models: Models, engine: LocalEngine, family: str, mode: TransferMode
) -> None:
    config = DeployConfig.model_validate(
        {
            "kv": {"page_size": PAGE_SIZE, "memory_gib": 0.01},
            "prefill": {"parallel": {"tp": 4}},
            "decode": {"parallel": {"tp": 4}},
            "transfer": {"mode": mode},
        }
    )
    folder, prompts = models.folder(family), prompts_of(LENGTHS)
    with engine.running(folder, config) as cluster:
        answers = cluster.generate(asked(prompts, 4))
    assert answers == [models.oracle(folder, 4).tokens(prompt) for prompt in prompts]
    page_bytes = PAGE_SIZE * read_model_config(folder).kv_geometry("m", "float32", PAGE_SIZE).bytes_per_token
    sends = engine.ask(Role.PREFILL, "last_load")[0].sends
    num_pages = sum(pages_for(length, PAGE_SIZE) for length in LENGTHS)
    assert sum(times.num_bytes for times in sends) == num_pages * page_bytes
    assert len({times.global_rank for times in sends if times.num_bytes}) == 4, "ranks share the pages"
