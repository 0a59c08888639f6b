"""What a rank is credited with when it times itself is what it computes."""

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.loading_rank import groups_of
from workers.engine.calibration import SAMPLES, Samples, _hidden, _NoAttention, alone_flops
from workers.models.decoder import DecoderModel
from workers.models.registry import read_model_config

NUM_TOKENS = 256


@pytest.mark.parametrize(
    ("family", "tolerance"),
    [("llama", 0.0), ("qwen3_moe", 0.2), ("qwen2_moe", 0.2)],
    ids=["dense", "experts, of which some are chosen more often", "a shared expert too"],
)
@pytest.mark.parametrize(
    "axes",
    [
        {},
        {"dp": 2},
        {"tp": 2},
        {"dp": 2, "tp": 2},
        {"cp": 2, "tp": 2},
        {"pp": 2, "dp": 2},
        {"ep": 2, "dp": 2},
        {"ep": 4, "cp": 2, "tp": 2},
    ],
    ids=str,
)
def test_a_rank_alone_is_credited_with_its_part(
    tmp_path: Path, family: str, tolerance: float, axes: dict[str, int]
) -> None:
    if family == "llama" and "ep" in axes:
        axes = {name: size for name, size in axes.items() if name != "ep"}
    config = read_model_config(make_checkpoint(tmp_path / "m", family))
    groups = groups_of(axes, 0)
    model = DecoderModel(config, dtype=torch.float32, device=torch.device("cpu"), groups=groups).float()
    torch.manual_seed(0)
    for weights in model.parameters():
        torch.nn.init.normal_(weights)
    layer, rotation = next(iter(model.layers.values())), model.rotary(torch.arange(NUM_TOKENS), torch.float32)
    with torch.inference_mode(), groups.alone(), FlopCounterMode(display=False) as counter:
        layer(_hidden(model, NUM_TOKENS), None, rotation, _NoAttention(), None)
    credited = alone_flops(model)
    assert counter.get_total_flops() / NUM_TOKENS == pytest.approx(credited, rel=tolerance)


def h200_linear_rate(samples: Samples) -> float:
    """Of a layer of Llama 3 8B, at 790 TFLOP/s and 4.3 TB/s, as two samples tell it."""
    weights = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    few_s, many_s = (max(2 * weights * tokens / 790e12, 2 * weights / 4.3e12) for tokens in samples.tokens)
    return 2 * weights * (samples.tokens[1] - samples.tokens[0]) / (many_s - few_s)


def test_samples_of_a_gpu_are_arithmetic() -> None:
    """What it reads, and the host's launches, of some 20 us each, are little beside it."""
    assert h200_linear_rate(SAMPLES["cpu"]) > 2 * 790e12
    assert h200_linear_rate(SAMPLES["cuda"]) == pytest.approx(790e12, rel=0.1)
    samples = SAMPLES["cuda"]
    assert 4 * 32 * 128 * samples.queries * samples.prefix / 790e12 > 10 * 20e-6
