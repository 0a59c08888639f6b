"""Self-measured work: a rank is credited with exactly what it computes."""

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.loading_rank import groups_of
from workers.device import CPU
from workers.engine.calibration import _hidden, _NoAttention, alone_flops, sampled_layer
from workers.models.decoder import DecoderModel, Residual
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
    model = DecoderModel(config, dtype=torch.float32, device=CPU, groups=groups).float()
    torch.manual_seed(0)
    for weights in model.parameters():
        torch.nn.init.normal_(weights)
    (layer, cost), rotation = sampled_layer(model), model.rotary(torch.arange(NUM_TOKENS), torch.float32)
    with torch.inference_mode(), groups.alone(), FlopCounterMode(display=False) as counter:
        layer(Residual(_hidden(model, NUM_TOKENS)), rotation, _NoAttention(model.attention.value_dim), None)
    credited = alone_flops(model, cost)
    assert counter.get_total_flops() / NUM_TOKENS == pytest.approx(credited, rel=tolerance)
