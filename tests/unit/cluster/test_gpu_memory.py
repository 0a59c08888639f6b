"""GPU memory left for pages: the arithmetic, and the planner's estimates for known models."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from cluster.planner.memory import model_problems, pool_gib
from cluster.planner.model import ModelFacts, read_model
from cluster.planner.worker_memory import expected_memory, weights_gib
from cluster.spec.config import DeployConfig, Device
from cluster.spec.loader import parse_config
from cluster.spec.memory import GIB, GpuMemory
from tests.unit.cluster.conftest import RunBaton

DEPLOY = Path(__file__).parents[3] / "deploy"

LLAMA_3_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
LLAMA_3_70B = LLAMA_3_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
}
MIXTRAL = LLAMA_3_8B | {
    "architectures": ["MixtralForCausalLM"],
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
}
DEEPSEEK_V32 = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "dtype": "bfloat16",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "index_topk": 2048,
    "vocab_size": 129280,
}
GLM_DSA = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "dtype": "bfloat16",
    "hidden_size": 6144,
    "index_topk": 2048,
    "indexer_types": [*["full"] * 3, *["shared", "shared", "shared", "full"] * 18, *["shared"] * 3],
    "intermediate_size": 12288,
    "kv_lora_rank": 512,
    "max_position_embeddings": 1 << 20,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 64,
    "num_hidden_layers": 78,
    "num_key_value_heads": 64,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "vocab_size": 154880,
}
QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "dtype": "bfloat16",
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "vocab_size": 151936,
}

DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "dtype": "bfloat16",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "max_position_embeddings": 131072,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "vocab_size": 129280,
}
"""DeepSeek-V3. Its defaults are those of the released checkpoint."""


def quantized(block: int | None) -> dict[str, Any]:
    """Return the fields of a checkpoint in square FP8 blocks."""
    settings = None if block is None else {"quant_method": "fp8", "weight_block_size": [block, block]}
    return {"quantization_config": settings}


def planned(folder: Path, shape: dict[str, Any], text: str) -> tuple[DeployConfig, ModelFacts]:
    (folder / "config.json").write_text(json.dumps(shape))
    config = parse_config(f"model: {{path: {folder}}}\nresources:\n  device: cuda\n{text}", "f.yaml")
    model = read_model(config)
    assert isinstance(model, ModelFacts)
    return config, model


def test_memory_left_for_pages() -> None:
    memory = GpuMemory(total=100, fraction=0.9, weights=16, activations=2, graphs=3, others=1)
    assert memory.left == 68
    assert str(memory) == (
        "0.9 of 100 GiB of GPU memory, less 16 for weights, 2 for activations, 3 for CUDA graphs and 1 for other uses, "
        "leaves 68 GiB"
    )


@pytest.mark.parametrize(
    ("shape", "tp", "weights_gib"), [(LLAMA_3_8B, 1, 14.96), (LLAMA_3_8B, 4, 3.74), (LLAMA_3_70B, 8, 16.4)]
)
def test_weights_of_known_models(tmp_path: Path, shape: dict[str, Any], tp: int, weights_gib: float) -> None:
    config, model = planned(tmp_path, shape, f"prefill: {{parallel: {{tp: {tp}}}}}\ndecode: {{parallel: {{tp: {tp}}}}}")
    memory = expected_memory(config, config.decode, model)
    assert memory.weights == pytest.approx(weights_gib, rel=0.01)
    assert pool_gib(config, config.decode, model) == memory.left > 80
    assert not model_problems(config, model)


@pytest.mark.parametrize(
    ("shape", "prefill", "device", "expected"),
    [
        (QWEN3_30B, "", "cpu", 56.85),
        (QWEN3_30B, "", "cuda", 29.87),
        (DEEPSEEK_V32, "parallel: {tp: 8}", "cuda", 82.49),
        # Query and output projections, which ranks send to each other, are dequantized.
        (DEEPSEEK_V32, "parallel: {cp: 16, ep: 16}, shard_linear: broadcast", "cuda", 51.67),
    ],
)
def test_weights_in_fp8_are_smaller_on_gpus(
    tmp_path: Path, shape: dict[str, Any], prefill: str, device: str, expected: float
) -> None:
    config, model = planned(tmp_path, shape | quantized(128), f"prefill: {{{prefill}}}")
    resources = config.resources.model_copy(update={"device": Device(device)})
    config = config.model_copy(update={"resources": resources})
    assert weights_gib(config, config.prefill, model) == pytest.approx(expected, rel=0.001)


def test_workers_that_share_a_gpu_divide_its_memory(tmp_path: Path) -> None:
    whole, model = planned(tmp_path, LLAMA_3_8B, "")
    memory = expected_memory(whole, whole.decode, model)
    shared = whole.model_copy(update={"resources": whole.resources.model_copy(update={"gpus_per_worker": 0.5})})
    assert expected_memory(shared, shared.decode, model).left == pytest.approx(memory.left - 0.9 * 139 / 2 - 1)


def test_graphs_of_decode_are_expected(tmp_path: Path) -> None:
    config, model = planned(tmp_path, LLAMA_3_8B, "kv: {page_size: 64}\ndecode: {max_requests: 4}")
    assert expected_memory(config, config.prefill, model).graphs == 0
    tables = (1 + 2 + 4) * (131072 / 64) * 8
    step = 4 * (4 * 4096 + 2 * 4096 + 4 * 1024 + 3 * 14336) * 2
    allowances = 3 * 32 * 2**18 + 2**25
    assert expected_memory(config, config.decode, model).graphs * GIB == tables + step + allowances
    config, model = planned(tmp_path, MIXTRAL, "kv: {page_size: 64}\ndecode: {max_requests: 4}")
    step += 4 * (2 * 3 * 14336 - 3 * 14336 + 2 * 4096) * 2
    assert expected_memory(config, config.decode, model).graphs * GIB == tables + step + allowances


def test_scores_of_captured_steps_are_expected(tmp_path: Path) -> None:
    def graphs(shape: dict[str, Any], max_requests: int) -> float:
        config, model = planned(tmp_path, shape, f"decode: {{max_requests: {max_requests}, parallel: {{tp: 8}}}}")
        return expected_memory(config, config.decode, model).graphs * GIB

    indexed = DEEPSEEK | {"architectures": ["DeepseekV32ForCausalLM"], "index_topk": 2048}
    for max_requests, num_scores in ((4, 4 * 131072), (1024, 1 << 25)):
        more = graphs(indexed, max_requests) - graphs(DEEPSEEK, max_requests)
        assert more == pytest.approx(6 * num_scores)


def test_steps_that_send_tokens_to_experts_take_no_graph_memory(tmp_path: Path) -> None:
    config, model = planned(tmp_path, MIXTRAL, "  moe_dispatch: all_to_all\ndecode: {parallel: {tp: 2, ep: 2}}")
    assert expected_memory(config, config.decode, model).graphs == 0


def test_sliding_windows_take_no_graph_memory(tmp_path: Path) -> None:
    shape = LLAMA_3_8B | {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "max_window_layers": 1}
    config, model = planned(tmp_path, shape, "")
    assert model.config.limits.has_windows
    assert expected_memory(config, config.decode, model).graphs == 0


def test_sampling_for_every_request_is_expected(tmp_path: Path) -> None:
    def activations(max_requests: int) -> float:
        config, model = planned(tmp_path, LLAMA_3_8B, f"decode: {{max_requests: {max_requests}}}")
        return expected_memory(config, config.decode, model).activations * GIB

    assert activations(256) - activations(128) == pytest.approx(128 * 128256 * 24)
    # Few requests fit into the memory of the step before.
    assert activations(2) == activations(4)


def test_a_rank_may_have_all_tokens_of_a_step(tmp_path: Path) -> None:
    def activations(strategy: str) -> float:
        text = f"prefill: {{parallel: {{cp: 2}}, strategy: {strategy}, chunk_tokens: 8192}}"
        config, model = planned(tmp_path, LLAMA_3_8B, text)
        return expected_memory(config, config.prefill, model).activations * GIB

    # Hidden states, their norm, the MLP, cosines and sines, and rows of keys and values.
    of_token = (2 * 4096 + 3 * 14336 + 2 * 128) * 2
    for strategy in ("auto", "none", "whole_request"):
        assert activations(strategy) - activations("zigzag") == pytest.approx(4096 * of_token)


def test_ring_buffers_are_included(tmp_path: Path) -> None:
    def activations(more: str) -> float:
        text = f"prefill: {{parallel: {{cp: 2, tp: 4}}, chunk_tokens: 8192, {more}}}"
        config, model = planned(tmp_path, LLAMA_3_8B, text)
        return expected_memory(config, config.prefill, model).activations * GIB

    gathered = activations("mode: gather")
    two_blocks = 2 * 65536 * 2 * 2 * 128 * 2
    new_rows = 8192 * 2 * 2 * 128 * 2
    pass_kv, pass_q = (activations(f"mode: ring, passing: {passing}") for passing in ("pass_kv", "pass_q"))
    assert pass_kv - (gathered - new_rows) == pytest.approx(two_blocks)
    # Apart from all ranks' queries, their results fit into the memory of the MLP, or nearly.
    assert 8192 * 8 * 128 * 2 <= pass_q - gathered < 2 * 8192 * 8 * 128 * 2
    assert activations("mode: ring") == max(pass_kv, pass_q)


def test_every_rank_of_a_ring_passes_whole_latents(tmp_path: Path) -> None:
    def activations(more: str) -> float:
        parallel, shape = "{cp: 2, tp: 8}", DEEPSEEK | {"first_k_dense_replace": 61}
        config, model = planned(tmp_path, shape, f"prefill: {{parallel: {parallel}, chunk_tokens: 8192, {more}}}")
        return expected_memory(config, config.prefill, model).activations * GIB

    # New rows are kept while they are sent, and gathered.
    without = activations("mode: gather") - (1 + 1.5) * 8192 * 576 * 2
    assert activations("mode: ring, passing: pass_kv") - without == pytest.approx(2 * 65536 * 576 * 2)


def test_memory_to_select_keys_is_included(tmp_path: Path) -> None:
    def activations(shape: dict[str, Any], more: str = "mode: gather", chunk_tokens: int = 8192, cp: int = 2) -> float:
        parallel = f"{{cp: {cp}, tp: 8}}"
        text = f"prefill: {{parallel: {parallel}, chunk_tokens: {chunk_tokens}, {more}}}"
        config, model = planned(tmp_path, shape, text)
        return expected_memory(config, config.prefill, model).activations * GIB

    dense = {"first_k_dense_replace": 61, "architectures": ["DeepseekV32ForCausalLM"], "index_topk": 2048}
    indexed = DEEPSEEK | dense
    # Per token: hidden states, their norm, cosines and sines, a selection of 32-bit numbers, and the indexer's queries,
    # key and weights; then 16 queries and results, and the largest tiles.
    of_step, of_index = 2 * 7168 + 2 * 64 + 2 * 2048, 64 * 128 + 128 + 2 * 64
    attending = of_step + of_index + 16 * (576 + 512)
    ring, all_keys, two_blocks = "mode: ring, passing: pass_kv", 131072 * 704 * 2, 2 * 65536 * 704 * 2
    tiles = 3 * 4 * (1 << 22)
    few = 2048 * attending * 2 + tiles
    assert activations(indexed, ring, chunk_tokens=2048) == pytest.approx(few + all_keys + two_blocks)
    assert activations(indexed, cp=1) == pytest.approx(8192 * attending * 2 + tiles)
    # In a step without a selection, queries, the first partial, its copy in fp32 and the next one, and new rows.
    merging = of_step + 16 * (576 + 512 + 2 * 512 + 512)
    assert activations(indexed, ring) == pytest.approx(8192 * merging * 2 + two_blocks)
    assert activations(indexed) == pytest.approx(8192 * (merging + (1.5 + 1) * 704) * 2)


def test_expanded_keys_are_included_but_do_not_grow_with_the_context(tmp_path: Path) -> None:
    def activations(max_len: int) -> float:
        shape = DEEPSEEK | {"max_position_embeddings": max_len}
        config, model = planned(tmp_path, shape, "prefill: {parallel: {tp: 16}, chunk_tokens: 64}")
        return expected_memory(config, config.prefill, model).activations * GIB

    # 8 heads of 256 elements from the latents, and of 192 in the keys that include the rotated part.
    assert activations(1 << 17) == activations(1 << 20) > 4096 * 8 * (256 + 192) * 2


def test_ranks_with_requests_of_their_own_share_mlps(tmp_path: Path) -> None:
    config, model = planned(tmp_path, LLAMA_3_70B, "prefill: {parallel: {dp: 8}}\ndecode: {parallel: {dp: 8}}")
    assert expected_memory(config, config.decode, model).weights == pytest.approx(39.5, rel=0.01)
    assert not model_problems(config, model)


@pytest.mark.parametrize(
    ("shape", "parallel", "num_others"),
    [
        (LLAMA_3_8B, "{dp: 4, cp: 2}", 3),
        (LLAMA_3_8B, "{cp: 2, tp: 4}", 0),
    ],
)
def test_a_step_holds_the_tokens_of_all_ranks_that_share_an_mlp(
    tmp_path: Path, shape: dict[str, Any], parallel: str, num_others: int
) -> None:
    def activations(axes: str) -> float:
        config, model = planned(tmp_path, shape, f"prefill: {{parallel: {axes}, strategy: zigzag, chunk_tokens: 8192}}")
        return expected_memory(config, config.prefill, model).activations * GIB

    alone = activations("{tp: 4, cp: 2, moe_dp: 2}" if "tp" in parallel else "{cp: 2, moe_dp: 2}")
    assert activations(parallel) - alone == pytest.approx(2 * num_others * 4096 * shape["hidden_size"] * 2)


@pytest.mark.parametrize(
    ("parallel", "chunk_tokens", "num_received", "widest"),
    [
        ("{}", 8192, 0, 16384 * 3 * 14336),
        ("{cp: 2, moe_dp: 2}", 8192, 0, 8192 * 3 * 14336),
        ("{cp: 2, ep: 2}", 8192, 8192, 16384 * 3 * 14336),  # few choices all have a row
        ("{cp: 2, ep: 2}", 65536, 65536, 65536 * 3 * 14336),
        ("{dp: 4, cp: 2}", 8192, 32768, (65536 + 32768) * 4096),
        ("{dp: 4, cp: 2, moe_dp: 2}", 8192, 16384, 32768 * 3 * 3584),
    ],
)
def test_a_gpu_computes_all_experts_at_once(
    tmp_path: Path, parallel: str, chunk_tokens: int, num_received: int, widest: int
) -> None:
    """Count received tokens, and for each chosen expert, two projections and their product, or answers and sums."""

    def activations(strategy: str) -> float:
        text = f"prefill: {{parallel: {parallel}, strategy: {strategy}, chunk_tokens: {chunk_tokens}}}"
        config, model = planned(tmp_path, MIXTRAL, text)
        return expected_memory(config, config.prefill, model).activations * GIB

    cp, of_token = 2 if "cp" in parallel else 1, 2 * 4096 + 2 * 128
    expected = chunk_tokens // cp * of_token + num_received * 4096 + widest + (cp > 1) * chunk_tokens * 2 * 1024
    assert activations("zigzag") == pytest.approx(2 * expected)
    if "ep" in parallel:  # ranks that compute the same tokens receive none
        undivided = expected + (chunk_tokens - chunk_tokens // cp) * of_token - num_received * 4096
        assert activations("none") == pytest.approx(2 * undivided)


@pytest.mark.parametrize(
    ("name", "shape", "prefill_left", "decode_left"),
    [
        ("h200-1x8", LLAMA_3_8B, 108, 121),
        ("h200-1x8-70b", LLAMA_3_70B, 58.5, 91),
        ("h200-1x8-moe", QWEN3_30B, 107, 110),
        ("h200-2x8-ring", LLAMA_3_8B, 106.6, 121),
        ("h200-4x8-dsa", DEEPSEEK_V32, 27, 21.1),
        ("h200-4x8-glm", GLM_DSA, 18, 70.6),
    ],
)
def test_committed_topologies_hold_their_models(
    baton: RunBaton, tmp_path: Path, name: str, shape: dict[str, Any], prefill_left: float, decode_left: float
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(shape))
    code, out, err = baton("plan", str(DEPLOY / f"{name}.yaml"), "--model", str(tmp_path), "--json")
    assert (code, err) == (0, "")
    plan = json.loads(out)
    assert [check for check in plan["checks"] if not check["passed"]] == []
    for role, left in (("prefill", prefill_left), ("decode", decode_left)):
        kv = plan["kv"]["roles"][role]
        gpu = GpuMemory(**kv["gpu"])
        assert gpu.left == pytest.approx(left, abs=1)
        assert kv["pool_bytes"] == pytest.approx(gpu.left * GIB, rel=0.01)


@pytest.mark.parametrize("shape", [GLM_DSA, {key: GLM_DSA[key] for key in GLM_DSA if key != "indexer_types"}])
def test_decode_without_stages_holds_the_requests_that_the_file_says(
    baton: RunBaton, tmp_path: Path, shape: dict[str, Any]
) -> None:
    """Every layer of GLM-5 has an indexer, unlike in GLM-5.2."""
    (tmp_path / "config.json").write_text(json.dumps(shape))
    file = DEPLOY / "h200-4x8-glm.yaml"
    thousands = re.findall(r"requests of up to (\d+)K tokens", file.read_text())
    settings = (f"model.max_context={thousands[0]}000", "decode.replicas=2", "decode.parallel.pp=1")
    options = [option for setting in settings for option in ("--set", setting)]
    code, out, err = baton("plan", str(file), "--model", str(tmp_path), *options)
    assert (code, err) == (0, ""), out


def test_the_tables_show_the_arithmetic(baton: RunBaton, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))
    _, out, _ = baton("plan", str(DEPLOY / "h200-1x8.yaml"), "--model", str(tmp_path))
    assert "each decode worker: 0.9 of 139 GiB of GPU memory, less 3.74 for weights, " in out


def test_insufficient_memory_is_reported_with_the_arithmetic(tmp_path: Path) -> None:
    config, model = planned(tmp_path, LLAMA_3_70B, "")
    messages = [str(problem) for problem in model_problems(config, model)]
    assert len(messages) == 2
    assert messages[0].startswith(
        "kv.memory_fraction: a prefill worker does not fit: 0.9 of 139 GiB of GPU memory, less 131 for weights, "
    )


def test_a_pool_that_is_too_large_is_reported(tmp_path: Path) -> None:
    config, model = planned(tmp_path, LLAMA_3_8B, "kv: {memory_gib: 120}")
    message = str(model_problems(config, model)[0])
    assert message.startswith("kv.memory_gib: a prefill worker does not fit: 0.9 of 139 GiB")
    assert message.endswith("and pages need 120.0 GiB")
    assert pool_gib(config, config.prefill, model) == 120
