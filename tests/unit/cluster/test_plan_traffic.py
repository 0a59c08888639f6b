"""Traffic between prefill ranks in a deployment plan, and the projections that they share."""

import json
from pathlib import Path

import pytest

from tests.unit.cluster.conftest import RunBaton
from tests.unit.cluster.test_plan import plan_of

LATENT = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 7,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 256,
    "kv_lora_rank": 64,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
}


@pytest.mark.parametrize(("way", "num_layers", "sent"), [("broadcast", 3 + 2, 7), ("gather", 7 / 3 + 2, 7 * 2 / 3)])
def test_projections_that_cp_ranks_hold_together_are_counted(
    baton: RunBaton, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, num_layers: float, sent: float
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "config.json").write_text(json.dumps(LATENT))
    prefill = f"prefill: {{parallel: {{cp: 3}}, shard_linear: {way}}}"
    text = f"model: {{path: {tmp_path}}}\n{prefill}\nresources: {{device: cuda}}"
    (file := tmp_path / "f.yaml").write_text(text)
    found = plan_of(text).projections
    assert found is not None
    layer_bytes = 2 * (256 * 8 * (128 + 64) + 8 * 128 * 512)
    assert found.whole_bytes == 7 * layer_bytes
    assert found.held_bytes == pytest.approx(num_layers * layer_bytes, rel=0.01)
    assert found.step_bytes == pytest.approx(sent * layer_bytes, rel=0.01)
    assert 0 < found.exposed_s < found.transfer_s
    shown = baton("plan", str(file))[1]
    assert f"shard_linear {way}: a prefill worker holds " in shown
    assert "at an assumed 200 GB/s, of which a step of 8,192 new tokens" in shown
    assert plan_of(f"model: {{path: {tmp_path}}}\nprefill: {{parallel: {{cp: 3}}}}").projections is None


@pytest.mark.parametrize(
    ("parallel", "others", "latents", "sums", "gathered"),
    [
        ("cp: 8, ep: 8", "", 7 / 8, 0, 0),
        ("tp: 8, ep: 8", "", 0, 2 * 7 / 8, 0),
        ("cp: 2, tp: 4, ep: 8", "", 1 / 2, 2 * 3 / 8, 0),
        ("cp: 8", ", strategy: none", 0, 0, 0),
        ("dp: 2, cp: 4, ep: 8", "", 3 / 4, 0, 2 / 4),
    ],
)
def test_traffic_is_counted_in_rows(
    tmp_path: Path, parallel: str, others: str, latents: float, sums: float, gathered: float
) -> None:
    """Compare with rows per token: latents, hidden states in fp32 that are summed, and those that DP ranks gather and
    return for MLPs and shared experts.
    """
    (tmp_path / "config.json").write_text(json.dumps({**LATENT, "first_k_dense_replace": 1}))
    prefill = f"prefill: {{parallel: {{{parallel}}}, chunk_tokens: 4096{others}}}"
    traffic = plan_of(f"model: {{path: {tmp_path}}}\n{prefill}\nresources: {{collectives: tcp}}").traffic
    assert traffic is not None
    latent_bytes, hidden_bytes = 2 * (64 + 64), 2 * 512
    assert traffic.context_bytes == latents * 4096 * latent_bytes
    assert traffic.attention_bytes == sums * 4096 * 2 * hidden_bytes
    assert traffic.mlp_bytes == (2 * sums + gathered) * 4096 * hidden_bytes
    assert traffic.expert_bytes > 0


@pytest.mark.parametrize(
    ("ranks", "groups", "dispatch", "tokens"),
    [
        # A token is gathered by all ranks, or sent to 8 random ranks of 8, or to those of 4 groups of 8.
        (8, 1, "gather", 7 / 8),
        (8, 1, "all_to_all", (1 - (7 / 8) ** 8) * 7 / 8),
        (8, 8, "all_to_all", (1 - (3 / 4) ** 8) / 2 * 7 / 8),
    ],
)
def test_a_token_is_sent_to_the_ranks_of_its_experts(
    baton: RunBaton, tmp_path: Path, ranks: int, groups: int, dispatch: str, tokens: float
) -> None:
    shape = {"first_k_dense_replace": 0, "n_group": groups, "topk_group": max(1, groups // 2)}
    (tmp_path / "config.json").write_text(json.dumps({**LATENT, **shape}))
    prefill = f"prefill: {{parallel: {{cp: {ranks}, ep: {ranks}}}, chunk_tokens: 4096}}"
    text = f"model: {{path: {tmp_path}}}\n{prefill}\nresources: {{moe_dispatch: {dispatch}}}"
    (file := tmp_path / "f.yaml").write_text(text)
    traffic = plan_of(text).traffic
    assert traffic is not None
    sent, returned = 2 * 512 + 8 * 8, 2 * 512
    assert traffic.expert_bytes == pytest.approx(tokens * 4096 * (sent + returned), rel=1e-6)
    shown = baton("plan", str(file))[1]
    assert "a worker receives per layer for 4,096 new tokens, divided by zigzag" in " ".join(shown.split())
    assert f"experts ({dispatch})" in shown
