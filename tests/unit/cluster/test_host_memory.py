"""Host memory of workers: its components, and the errors for machines that are too small."""

import json
from pathlib import Path

import pytest

from cluster.machine_memory import MachineMemory, machine_memory
from cluster.planner.memory import kv_plan, model_problems
from cluster.planner.model import ModelFacts, read_model
from cluster.spec.config import DeployConfig
from cluster.spec.ids import Role
from cluster.spec.kv import DTYPE_BYTES
from cluster.spec.loader import parse_config
from cluster.spec.memory import GIB, HostMemory

TIERS = """
kv: {memory_gib: 0.5}
prefill: {replicas: 2, parallel: {cp: 2}}
hicache: {host_gib: 3.0}
"""


def facts(config: DeployConfig) -> ModelFacts:
    model = read_model(config)
    assert isinstance(model, ModelFacts)
    return model


def memory_of(text: str, role: Role) -> HostMemory:
    config = parse_config(text, "f.yaml")
    return kv_plan(config, facts(config)).roles[role].host


def problems_of(text: str) -> list[str]:
    config = parse_config(text, "f.yaml")
    return [str(problem) for problem in model_problems(config, facts(config))]


def test_everything_a_worker_takes_is_added_up() -> None:
    prefill, decode = (memory_of(TIERS, role) for role in (Role.PREFILL, Role.DECODE))
    assert (prefill.pages, prefill.cached) == (0.5, 3.0)
    assert (decode.pages, decode.cached) == (0.5, 3.0)
    assert 0 < prefill.weights < 0.02
    assert 0 < decode.activations < prefill.activations < 0.1
    assert decode.total == pytest.approx(3.5 + decode.weights + decode.activations)


LAYERS, HIDDEN, HEAD_DIM, HEADS, WIDTH, VOCAB = 5, 64, 16, 4, 128, 1024
LAYER = 4 * HIDDEN * HEADS * HEAD_DIM + 3 * HIDDEN * WIDTH
TABLE = VOCAB * HIDDEN


@pytest.mark.parametrize(
    ("is_tied", "dtype", "parallel", "expected"),
    [
        (False, "float32", "{}", 2 * TABLE + 5 * LAYER),
        (True, "float32", "{}", TABLE + 5 * LAYER),
        (True, "bfloat16", "{}", 2 * TABLE + 5 * LAYER),
        (True, "float32", "{pp: 2}", TABLE + 3 * LAYER),
        (False, "bfloat16", "{pp: 3}", TABLE + 2 * LAYER),
        (True, "bfloat16", "{pp: 5}", TABLE + LAYER),
        (True, "bfloat16", "{tp: 2}", TABLE + 2.5 * LAYER),
    ],
)
def test_the_stage_with_most_weights_counts(
    tmp_path: Path, is_tied: bool, dtype: str, parallel: str, expected: float
) -> None:
    shape = {"architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "intermediate_size": WIDTH}
    shape |= {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": HEAD_DIM}
    shape |= {"num_hidden_layers": LAYERS, "vocab_size": VOCAB, "max_position_embeddings": 4096}
    shape |= {"dtype": dtype, "tie_word_embeddings": is_tied}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    memory = memory_of(f"model: {{path: {tmp_path}}}\ndecode: {{parallel: {parallel}}}", Role.DECODE)
    assert memory.weights * GIB == expected * DTYPE_BYTES[dtype]


def test_weights_in_fp8_blocks_count_in_the_dtype_in_which_they_are_kept(tmp_path: Path) -> None:
    shape = {"architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "intermediate_size": WIDTH}
    shape |= {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": HEAD_DIM, "dtype": "bfloat16"}
    shape |= {"num_hidden_layers": LAYERS, "vocab_size": VOCAB, "max_position_embeddings": 4096}
    shape |= {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    memory = memory_of(f"model: {{path: {tmp_path}}}", Role.DECODE)
    assert memory.weights * GIB == 2 * (2 * TABLE + 5 * LAYER)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ("kv: {memory_gib: 0.5, prefix_cache: false}\nhicache: {host_gib: 3.0}", "cached"),
        ("resources: {device: cuda}", "weights"),
        ("resources: {device: cuda}", "activations"),
    ],
)
def test_unused_memory_is_not_counted(change: str, field: str) -> None:
    assert getattr(memory_of(change, Role.DECODE), field) == 0


def test_memory_of_a_store_client_is_counted() -> None:
    text = "hicache: {{host_gib: 1.0, storage: {{backend: {}}}}}"
    without, memory = (memory_of(text.format(backend), Role.PREFILL) for backend in ("files", "mooncake_store"))
    assert (without.in_transit, memory.in_transit) == (0.0, 128 / 1024)
    assert memory.total == pytest.approx(without.total + 128 / 1024)
    assert str(memory).endswith("0.125 for data in transit to and from storage")


def test_a_machine_that_lacks_memory_is_refused_with_the_arithmetic() -> None:
    assert not problems_of(f"{TIERS}\nresources: {{machine_memory_gib: 17.9}}")
    assert problems_of(f"{TIERS}\nresources: {{machine_memory_gib: 17}}") == [
        "resources.machine_memory_gib: got 17; allowed: at least 17.87, for 4 prefill workers of 3.59 GiB: "
        "0.00949 for weights, 0.0781 for activations, 0.5 for pages, 3 for cached pages; 1 decode worker of 3.52 GiB: "
        "0.00949 for weights, 0.0137 for activations, 0.5 for pages, 3 for cached pages"
    ]


def test_host_memory_that_holds_no_page_is_refused() -> None:
    given = "kv: {{memory_gib: 0.5}}\nhicache: {{host_gib: {}}}"
    assert not problems_of(given.format(0))
    problems = problems_of(given.format("0.00001"))
    assert len(problems) == 2
    assert problems[0].startswith("hicache.host_gib: got 1e-05; allowed: 0, or at least 0.000")
    least = problems[0].split("at least ")[1].split(" ")[0]
    assert not problems_of(given.format(least))
    assert problems_of(given.format(f"{float(least) - 2e-6:.6f}"))
    assert not problems_of("kv: {memory_gib: 0.5, prefix_cache: false}\nhicache: {host_gib: 0.00001}")


def test_files_that_hold_no_page_are_refused() -> None:
    given = "kv: {{memory_gib: 0.5}}\nhicache: {{host_gib: 1, storage: {{backend: {}, max_gib: {}}}}}"
    problems = problems_of(given.format("files", "0.00001"))
    assert len(problems) == 2
    assert problems[0].startswith("hicache.storage.max_gib: got 1e-05; allowed: at least 0.000")
    least = problems[0].split("at least ")[1].split(" ")[0]
    assert not problems_of(given.format("files", least))
    assert problems_of(given.format("files", f"{float(least) - 2e-6:.6f}"))
    assert not problems_of(given.format("mooncake_store", "0.00001"))


def test_workers_that_may_be_on_many_machines_must_fit_one_by_one() -> None:
    several = f"{TIERS}\ntransfer: {{backend: mooncake}}"
    assert not problems_of(f"{several}\nresources: {{machine_memory_gib: 3.6}}")
    (problem,) = problems_of(f"{several}\nresources: {{machine_memory_gib: 3}}")
    assert problem.startswith("resources.machine_memory_gib: got 3; allowed: at least 3.576, for whichever needs more")


MEMINFO = "".join(
    f"{key}:   {gib * 2**20} kB\n" for key, gib in (("MemTotal", 64), ("MemAvailable", 48), ("SwapTotal", 8))
)
GROUP = {
    "memory.max": f"{16 * GIB}\n",
    "memory.current": f"{12 * GIB}\n",
    "memory.stat": f"anon {9 * GIB}\ninactive_file {3 * GIB}\nactive_file 0\n",
    "memory.swap.max": "0\n",
}


def test_machine_memory_is_the_kernels() -> None:
    memory = MachineMemory.of(MEMINFO, {})
    assert (memory.total, memory.available, memory.owner) == (72 * GIB, 48 * GIB, "this machine")
    assert MachineMemory.of(MEMINFO, GROUP | {"memory.max": "max\n"}) == memory
    assert MachineMemory.of("", {}) == MachineMemory(total=0, available=0)


def test_a_container_has_no_more_than_its_control_group_leaves() -> None:
    memory = MachineMemory.of(MEMINFO, GROUP)
    assert (memory.total, memory.available, memory.owner) == (16 * GIB, 7 * GIB, "this container")
    assert MachineMemory.of(MEMINFO, GROUP | {"memory.swap.max": "max\n"}).total == 24 * GIB
    assert MachineMemory.of(MEMINFO, GROUP | {"memory.max": f"{8 * GIB}"}).available == 0


def test_a_limit_above_the_machines_memory_is_ignored() -> None:
    memory = MachineMemory.of(MEMINFO, GROUP | {"memory.max": f"{1024 * GIB}", "memory.swap.max": "max"})
    assert memory == MachineMemory.of(MEMINFO, {})


def test_files_are_read_where_they_are(tmp_path: Path) -> None:
    for name, text in (GROUP | {"meminfo": MEMINFO}).items():
        (tmp_path / name).write_text(text)
    assert machine_memory(tmp_path / "meminfo", tmp_path) == MachineMemory.of(MEMINFO, GROUP)
    assert machine_memory(tmp_path / "none", tmp_path / "none") == MachineMemory(total=0, available=0)
    assert machine_memory().available > 0
