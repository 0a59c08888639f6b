"""Tokens do not depend on the tier that holds a prompt, for pages of GPU memory too: `pytest -m gpu tests/gpu`."""

from pathlib import Path

import pytest

from tests.fakes.local_engine import LocalEngine, Models
from tests.gpu.test_workers import NUM_TOKENS, RESOURCES
from tests.integration.test_hicache import GATHER, RING, Way, check_tiers
from tests.integration.test_hicache import WORKER as WORKER

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]  # a cold cache compiles every kernel


@pytest.mark.parametrize("family", ["llama", "deepseek_v2"])
@pytest.mark.parametrize("way", [(1, GATHER, 1), (2, GATHER, 1), (2, RING, 2)], ids=str)
def test_tokens_do_not_depend_on_the_tiers(
    family: str, way: Way, models: Models, engine: LocalEngine, tmp_path: Path
) -> None:
    checkpoint = models.folder(family)
    oracle = models.oracle(checkpoint, NUM_TOKENS)
    check_tiers(way, checkpoint, oracle, engine, tmp_path, resources=RESOURCES)
