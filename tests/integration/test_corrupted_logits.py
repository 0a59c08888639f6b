"""A request whose logits are not finite ends with an error, wherever they are computed, and disturbs no other."""

import math
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from cluster.spec.config import DeployConfig
from cluster.spec.sampling import Sampling, Stopping
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.local_cluster import Prompt
from tests.fakes.local_engine import LocalEngine, Models, asked, prompts_of
from workers.bench.process import RemoteError

pytestmark = pytest.mark.integration

NUM_TOKENS, BAD = 12, 7


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose embedding of one token is not a number."""
    folder = make_checkpoint(tmp_path_factory.mktemp("corrupted") / "qwen3", "qwen3", seed=11)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][BAD] = math.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("prompt", "sampling", "replica"),
    [([20, BAD, 21], Sampling(), "prefill-0"), ([20, 21], Sampling(allowed_ids=frozenset({BAD})), "decode-0")],
    ids=["prefill", "decode"],
)
def test_a_corrupted_request_fails_alone(
    checkpoint: Path, models: Models, engine: LocalEngine, prompt: list[int], sampling: Sampling, replica: str
) -> None:
    good = [[token_id for token_id in prompt if token_id != BAD] for prompt in prompts_of((5, 90))]
    expected = [models.oracle(checkpoint, NUM_TOKENS).tokens(each) for each in good]
    config = DeployConfig.model_validate({"model": {"served_name": "qwen3"}, "kv": {"memory_gib": 0.01}})
    with engine.running(checkpoint, config) as local:
        with pytest.raises(RemoteError, match=f"{replica}: the model's logits are not finite"):
            local.answer([Prompt(prompt, Stopping(max_tokens=NUM_TOKENS), sampling)])
        assert local.generate(asked(good, NUM_TOKENS), timeout_s=120) == expected
