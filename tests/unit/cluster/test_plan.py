"""The plan and `baton plan`: contents, JSON, tables, and the errors for a bad file."""

import io
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.planner.model import UnknownModel, facts_of, read_model
from cluster.planner.plan import Plan, make_plan
from cluster.spec.config import DeployConfig
from cluster.spec.errors import ConfigError
from cluster.spec.ids import Role
from cluster.spec.loader import load_config, parse_config
from cluster.spec.memory import GIB, pool_layout
from cluster.spec.ranks import positions, sizes_of
from tests.fakes.kv import kv_geometry
from tests.unit.cluster.conftest import RunBaton

QWEN = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "dtype": "bfloat16",
}


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    return tmp_path


TOPOLOGIES = sorted(path for path in (Path(__file__).parents[3] / "deploy").glob("*.yaml") if path.stem != "job")
WITH_EXPERTS = {
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


def plan_of(text: str) -> Plan:
    config = parse_config(text, "f.yaml")
    return make_plan(config, read_model(config))


def failed(plan: Plan) -> dict[str, str]:
    return {check.rule: check.detail for check in plan.checks if not check.passed}


def test_json_has_the_documented_shape(baton: RunBaton, tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    (tmp_path / "config.json").write_text(json.dumps(WITH_EXPERTS))
    file.write_text(f"model: {{path: {tmp_path}}}\nprefill: {{replicas: 2, parallel: {{cp: 2, tp: 2, pp: 2, ep: 2}}}}")
    code, out, err = baton("plan", str(file), "--json")
    assert (code, err) == (0, "")
    plan = json.loads(out)
    assert [(replica["role"], replica["name"]) for replica in plan["replicas"]] == [
        ("prefill", "prefill-0"),
        ("prefill", "prefill-1"),
        ("decode", "decode-0"),
    ]
    first = plan["replicas"][0]
    assert first["ranks"][6] == {
        "global_rank": 6,
        "dp": 0,
        "cp": 1,
        "tp": 0,
        "pp": 1,
        "moe_dp": 0,
        "ep": 1,
        "moe_tp": 0,
    }
    assert first["groups"] == {
        "attn_tp": [[0, 1], [2, 3], [4, 5], [6, 7]],
        "attn_cp": [[0, 2], [1, 3], [4, 6], [5, 7]],
        "attn_dp": [[rank] for rank in range(8)],
        "moe_dp": [[rank] for rank in range(8)],
        "moe_ep": [[0, 2], [1, 3], [4, 6], [5, 7]],
        "moe_tp": [[0, 1], [2, 3], [4, 5], [6, 7]],
        "moe_block": [[0, 1, 2, 3], [4, 5, 6, 7]],
        "moe_shards": [[0, 2], [1, 3], [4, 6], [5, 7]],
        "pp": [[0, 4], [1, 5], [2, 6], [3, 7]],
    }
    assert plan["kv"]["bytes_per_token"] == 2048


@pytest.mark.parametrize("file", TOPOLOGIES, ids=lambda file: file.stem)
def test_every_committed_topology_can_be_planned(file: Path) -> None:
    config = load_config(file)
    assert failed(make_plan(config, read_model(config))).keys() <= {"the model's shape is known"}


def test_mixture_of_experts_topology_fits_its_model(tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "num_local_experts": 128}
    (tmp_path / "config.json").write_text(json.dumps({**WITH_EXPERTS, **shape, "max_position_embeddings": 40960}))
    config = load_config(TOPOLOGIES[0].with_name("qwen3-moe.yaml"), {"model.path": str(tmp_path)})
    assert failed(make_plan(config, read_model(config))) == {}


def test_kv_of_the_built_in_model() -> None:
    kv = plan_of("kv: {page_size: 64, memory_gib: 0.5}").kv
    assert kv is not None
    assert kv.bytes_per_token == 2 * 2 * 1 * 128 * 4
    decode = kv.roles[Role.DECODE]
    assert decode.page_bytes == 64 * kv.bytes_per_token
    assert decode.pages_per_worker == 4096 - 1
    assert decode.tokens_per_worker == 4095 * 64


def test_kv_of_a_model_folder(model_folder: Path) -> None:
    kv = plan_of(f"model: {{path: {model_folder}}}\nprefill: {{parallel: {{tp: 4, pp: 3}}}}").kv
    assert kv is not None
    assert kv.groups == ("full_attention (28 layers, 8 heads, k 128 + v 128 bfloat16)",)
    assert kv.bytes_per_token == 2 * 28 * 8 * 128 * 2
    prefill = kv.roles[Role.PREFILL]
    assert prefill.page_bytes == 64 * 2 * 10 * 2 * 128 * 2
    assert prefill.pages_per_worker == GIB // prefill.page_bytes - 1
    assert kv.tokens_per_request == kv.roles[Role.DECODE].tokens_per_request


def test_pool_too_small_for_the_longest_request_fails_its_check(model_folder: Path) -> None:
    plan = plan_of(f"model: {{path: {model_folder}}}")
    assert failed(plan) == {
        "every replica holds the longest request": "9280 tokens fit, but a request can have 40960: "
        "set kv.memory_gib to 4.39, or model.max_context to 9280"
    }
    text = f"model: {{path: {model_folder}}}\nkv: {{memory_gib: 4.39}}"
    assert failed(plan_of(text)) == {}
    assert failed(plan_of(f"model: {{path: {model_folder}, max_context: 9280}}")) == {}


def test_context_per_replica_grows_with_the_ranks_of_a_ring(model_folder: Path) -> None:
    text = f"""
        model: {{path: {model_folder}}}
        prefill: {{parallel: {{cp: 4}}, mode: %s}}
        decode: {{parallel: {{tp: 4}}}}
    """
    gather, ring = plan_of(text % "gather"), plan_of(text % "ring")
    assert gather.kv is not None
    assert ring.kv is not None
    held = gather.kv.roles[Role.PREFILL]
    assert held.tokens_per_replica == held.tokens_per_worker == 9280
    assert ring.kv.roles[Role.PREFILL].tokens_per_worker == 9280
    assert ring.kv.roles[Role.PREFILL].tokens_per_replica == 4 * 9280
    assert failed(gather) == {
        "every replica holds the longest request": "9280 tokens fit, but a request can have 40960: "
        "set kv.memory_gib to 4.39, or model.max_context to 9280"
    }
    assert failed(ring) == {
        "every replica holds the longest request": "37120 tokens fit, but a request can have 40960: "
        "set kv.memory_gib to 1.11, or model.max_context to 37120"
    }
    assert failed(plan_of(f"{text % 'ring'}\n        kv: {{memory_gib: 1.11}}")) == {}


def test_ranks_with_requests_of_their_own_hold_more_tokens_but_no_longer_request(model_folder: Path) -> None:
    text = f"""
        model: {{path: {model_folder}}}
        prefill: {{parallel: {{dp: %d, cp: 2}}, mode: ring}}
        decode: {{parallel: {{dp: %d}}}}
    """
    alone, shared = plan_of(text % (1, 1)), plan_of(text % (4, 3))
    assert alone.kv is not None
    assert shared.kv is not None
    for role, num_owners, dp in ((Role.PREFILL, 2, 4), (Role.DECODE, 1, 3)):
        assert alone.kv.roles[role].tokens_per_replica == num_owners * 9280
        assert shared.kv.roles[role].tokens_per_request == num_owners * 9280
        assert shared.kv.roles[role].tokens_per_replica == dp * num_owners * 9280
    assert failed(shared) == failed(alone)
    assert "9280 tokens fit" in failed(shared)["every replica holds the longest request"]


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        (
            "model: {max_context: 50000}",
            ["model.max_context: got 50000; allowed: at most 40960, the model's own limit"],
        ),
        (
            "kv: {memory_gib: 0.01}",
            [
                "kv.memory_gib: got 0.01; a prefill worker's 0.01 GiB cannot hold a page and the null page; "
                "each takes 7340032 bytes, so set at least 0.0137 GiB",
                "kv.memory_gib: got 0.01; a decode worker's 0.01 GiB cannot hold a page and the null page; "
                "each takes 7340032 bytes, so set at least 0.0137 GiB",
            ],
        ),
    ],
)
def test_a_model_error_is_a_file_error(model_folder: Path, text: str, messages: list[str]) -> None:
    config = parse_config(text, "f.yaml")
    with pytest.raises(ConfigError) as caught:
        make_plan(config, facts_of(config, model_folder))
    assert str(caught.value).splitlines() == messages


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from((1, 2, 4)),
    st.sampled_from((1, 2, 4, 8)),
    st.integers(1, 4),
    st.integers(4, 12),
    st.integers(1, 64),
    st.floats(0.001, 2.0),
)
def test_pools_hold_the_whole_model_and_stay_within_their_memory(
    num_kv_heads: int, tp: int, pp: int, num_layers: int, page_size: int, memory_gib: float
) -> None:
    geometry = kv_geometry(
        model="m", num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=8, dtype="bfloat16", page_size=page_size
    )
    parallel = DeployConfig().prefill.parallel.model_copy(update={"tp": tp, "pp": pp})
    layouts = [pool_layout(geometry, sizes_of(parallel), rank.coords, memory_gib) for rank in positions(parallel)]
    held = {
        (layer, head) for pool in layouts for group in pool.groups for layer in group.layers for head in group.heads
    }
    assert held == {(layer, head) for layer in range(num_layers) for head in range(num_kv_heads)}
    assert all(pool.pool_bytes <= memory_gib * GIB < pool.pool_bytes + pool.page_bytes for pool in layouts)


def test_model_that_is_not_here_yet_leaves_kv_unknown() -> None:
    config = DeployConfig()
    plan = make_plan(config, UnknownModel("it is elsewhere"))
    assert plan.kv is None
    assert failed(plan) == {"the model's shape is known": "it is elsewhere"}


@pytest.mark.parametrize("option", [(), ("--json",)])
def test_a_failed_check_has_a_fix_and_an_exit_code(
    baton: RunBaton, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: tuple[str, ...]
) -> None:
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    monkeypatch.setenv("COLUMNS", "400")
    (file := tmp_path / "f.yaml").write_text("model: {path: owner/name}")
    code, out, err = baton("plan", str(file), *option)
    assert (code, err) == (1, "")
    assert "not in this machine's Hugging Face cache yet; `hf download owner/name config.json` fetches all" in out


@pytest.mark.parametrize("model", ["owner/name:latest", "~nobody-has-this-name/model"])
def test_an_impossible_name_of_a_model_is_refused_in_one_line(baton: RunBaton, model: str) -> None:
    code, out, err = baton("plan", "--model", model)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"model.path: got '{model}'")


def test_a_file_that_cannot_be_looked_up_is_reported_in_one_line(baton: RunBaton) -> None:
    name = "x" * 300
    assert baton("plan", name) == (2, "", f"{name}: File name too long\n")


def test_folder_without_a_model_leaves_kv_unknown(tmp_path: Path) -> None:
    plan = plan_of(f"model: {{path: {tmp_path}}}")
    assert plan.kv is None
    assert failed(plan) == {"the model's shape is known": f"{tmp_path} is not a model folder: it has no config.json"}


def test_a_full_disk_is_reported_in_one_line(baton: RunBaton, monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("wb", buffering=0) as full:
        monkeypatch.setattr("sys.stdout", io.TextIOWrapper(full, write_through=True))
        code, _, err = baton("plan")
    assert (code, err) == (2, "output: No space left on device\n")


def test_tables_show_every_part(baton: RunBaton, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    file = tmp_path / "f.yaml"
    file.write_text("name: shown\nprefill: {replicas: 2, parallel: {cp: 2}}")
    assert baton("plan", str(file))[1].endswith("\n16 checks pass\n")
    code, out, err = baton("plan", "--verbose", str(file))
    assert (code, err) == (0, "")
    for part in (
        "Cluster shown serves the model recall",
        "prefill-0 to prefill-1, each: 2 workers",
        "decode-0: 1 worker",
        "attn_cp      {0,1}",
        "KV memory: 2 KiB per token, 64 tokens per page\n  full_attention (2 layers, 1 head, k 128 + v 128 float32)\n",
        "HTTP for clients",
        "prefill.passing applies only in ring mode",
    ):
        assert part in out


@pytest.mark.parametrize(("pp", "shown"), [(1, False), (2, True)])
def test_tables_show_why_decode_steps_are_not_captured(baton: RunBaton, tmp_path: Path, pp: int, shown: bool) -> None:
    file = tmp_path / "f.yaml"
    file.write_text(f"decode: {{parallel: {{pp: {pp}}}}}")
    code, out, err = baton("plan", str(file))
    assert (code, err) == (0, "")
    assert ("\ndecode steps are not captured: pipeline stages\n" in out) == shown


@pytest.mark.parametrize(("tp", "shown"), [(1, False), (2, True)])
def test_tables_show_decode_ranks_with_the_same_heads(
    baton: RunBaton, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp: int, shown: bool
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    file = tmp_path / "f.yaml"
    (tmp_path / "config.json").write_text(json.dumps(WITH_EXPERTS))
    file.write_text(
        f"model: {{path: {tmp_path}}}\nprefill: {{parallel: {{tp: 2}}}}\ndecode: {{parallel: {{tp: {tp}}}}}"
    )
    code, out, err = baton("plan", str(file))
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines() if line.strip().startswith("head_copies")]
    assert lines == ([["head_copies", "{0,1}"]] if shown else [])
    code, out, err = baton("plan", str(file), "--json")
    copies = {replica["role"]: replica["head_copies"] for replica in json.loads(out)["replicas"]}
    assert copies == {"prefill": [], "decode": [[0, 1]] if shown else []}


def test_bad_file_prints_its_problems_and_nothing_else(baton: RunBaton, tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_text("prefil: {}\ndecode: {parallel: {tp: 0}}\nrouter: {port: http}")
    code, out, err = baton("plan", str(file), "--json")
    assert (code, out) == (2, "")
    assert [line.split(":")[0] for line in err.splitlines()] == ["decode.parallel.tp", "router.port", "prefil"]


def test_missing_file_and_missing_folder_are_one_line(baton: RunBaton, tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    assert baton("plan", str(file)) == (2, "", f"{file}: no such file\n")
    file.write_text("{}")
    assert baton("plan", str(file), "--model", "./nowhere") == (
        2,
        "",
        "model.path: got './nowhere', which is not a folder; "
        "allowed: recall, recall-moe, recall-latent, recall-sparse, a local folder, "
        "a Hugging Face repository like 'owner/name'\n",
    )


def test_model_option_wins_over_the_file(baton: RunBaton, tmp_path: Path, model_folder: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_text("model: {path: recall, served_name: mine, max_context: 1024}")
    code, out, _ = baton("plan", str(file), "--json", "--model", str(model_folder))
    assert code == 0
    assert json.loads(out)["kv"]["num_layers"] == 28


def test_help_names_every_command(baton: RunBaton) -> None:
    code, out, _ = baton("--help")
    assert code == 0
    for command in ("plan", "up", "status", "down", "doctor", "chat", "bench", "schema"):
        assert command in out


def test_schema_command_prints_the_committed_schema(baton: RunBaton) -> None:
    committed = Path(__file__).parents[3] / "deploy" / "schema.json"
    assert baton("schema") == (0, committed.read_text(), "")


def test_advice_where_roles_share_cores() -> None:
    advice = plan_of("resources: {device: cpu}").advice
    assert advice is not None
    assert "local-cpu-fast.yaml" in advice
    assert plan_of("{resources: {device: cpu}, prefill: {skip_below_tokens: 512}}").advice is None
    assert plan_of("resources: {device: cuda}").advice is None
    assert plan_of("{resources: {device: cpu}, transfer: {backend: mooncake}}").advice is None
