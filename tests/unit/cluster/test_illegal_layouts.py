"""Illegal replica layouts, and their errors from `baton plan`, from `baton up` before Ray starts, and from workers."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.cli.start import check_model
from cluster.spec.checks import ModelLimits, layout_problems
from cluster.spec.config import ParallelConfig
from cluster.spec.errors import ConfigError, UserError
from cluster.spec.ids import Role
from cluster.spec.loader import load_config
from tests.unit.cluster.conftest import RunBaton
from workers.models.registry import read_model_config

Axes = dict[str, int]
DECODE_AXES = {"dp", "tp", "pp", "ep"}

ILLEGAL: dict[str, tuple[Axes, list[str]]] = {
    "no rank": ({"tp": 0}, ["{path}.tp: got 0; allowed: a whole number, 1 or more"]),
    "no whole rank": ({"moe_dp": -2}, ["{path}.moe_dp: got -2; allowed: a whole number, 1 or more"]),
    "no axis": (
        {"moe_tp": 2},
        ["{path}.moe_tp: unknown key; did you mean moe_dp? allowed: dp, tp, pp, ep, cp, moe_dp"],
    ),
    "too many workers": (
        {"dp": 8, "tp": 32, "pp": 32},
        ["{path}: got dp*cp*tp*pp = 8*1*32*32 = 8192 workers; allowed: up to 4096 per replica"],
    ),
    "experts that leave ranks over": (
        {"dp": 2, "tp": 2, "ep": 3},
        [
            "{path}: moe_dp*ep = 1*3 = 3 does not divide dp*cp*tp = 2*1*2 = 4; "
            "the experts use the ranks that attention uses"
        ],
    ),
    "copies of experts without cp": ({"tp": 2, "moe_dp": 2}, ["{path}.moe_dp: got 2 with cp = 1; allowed: 1"]),
    "copies of experts for some cp ranks": (
        {"cp": 4, "moe_dp": 2},
        ["{path}.moe_dp: got 2 with cp = 4; allowed: 1 or cp = 4"],
    ),
    "copies of experts in a pipeline": (
        {"cp": 2, "pp": 2, "moe_dp": 2},
        ["{path}.moe_dp: got 2 with pp = 2; moe_dp and pp cannot both be more than 1"],
    ),
    "everything at once": (
        {"cp": 2, "pp": 2, "moe_dp": 3},
        [
            "{path}: moe_dp*ep = 3*1 = 3 does not divide dp*cp*tp = 1*2*1 = 2; "
            "the experts use the ranks that attention uses",
            "{path}.moe_dp: got 3 with cp = 2; allowed: 1 or cp = 2",
            "{path}.moe_dp: got 3 with pp = 2; moe_dp and pp cannot both be more than 1",
        ],
    ),
}
SHAPE: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "vocab_size": 100,
    "max_position_embeddings": 4096,
    "dtype": "float32",
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"architectures": ["LlamaForCausalLM"], **SHAPE},
    "experts": {
        "architectures": ["MixtralForCausalLM"],
        **SHAPE,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}
NOT_OF_THIS_MODEL: dict[str, tuple[str, Axes, list[str]]] = {
    "heads": ("dense", {"tp": 5}, ["{path}.tp: got 5; allowed: a divisor of the model's 12 heads"]),
    "KV heads": (
        "dense",
        {"tp": 4},
        ["{path}.tp: got 4; allowed: a divisor or a multiple of the model's 6 KV heads"],
    ),
    "layers": ("dense", {"pp": 3}, ["{path}.pp: got 3; allowed: at most the model's 2 layers"]),
    "no experts": ("dense", {"dp": 2, "ep": 2}, ["{path}.ep: got 2; allowed: 1, since the model has no experts"]),
    "no experts to copy": (
        "dense",
        {"cp": 2, "moe_dp": 2},
        ["{path}.moe_dp: got 2; allowed: 1, since the model has no experts"],
    ),
    "experts": ("experts", {"tp": 3, "ep": 3}, ["{path}.ep: got 3; allowed: a divisor of the model's 4 experts"]),
    "several": (
        "experts",
        {"dp": 3, "tp": 4, "pp": 4, "ep": 3},
        [
            "{path}.tp: got 4; allowed: a divisor or a multiple of the model's 6 KV heads",
            "{path}.ep: got 3; allowed: a divisor of the model's 4 experts",
            "{path}.pp: got 4; allowed: at most the model's 2 layers",
        ],
    ),
}

ROLES_OF_MODELS = [(Role.PREFILL, name) for name in NOT_OF_THIS_MODEL]
ROLES_OF_MODELS += [
    (Role.DECODE, name) for name, (_, axes, _) in NOT_OF_THIS_MODEL.items() if axes.keys() <= DECODE_AXES
]
ROLES_OF_LAYOUTS = [(Role.PREFILL, name) for name in ILLEGAL]
ROLES_OF_LAYOUTS += [(Role.DECODE, name) for name, (axes, _) in ILLEGAL.items() if axes.keys() <= DECODE_AXES]


def write_file(folder: Path, role: Role, axes: Axes, **others: Any) -> str:
    file = folder / "f.yaml"
    file.write_text(json.dumps({role.value: {"parallel": axes}, **others}))
    return str(file)


@pytest.mark.parametrize("command", ["plan", "up"])
@pytest.mark.parametrize(("role", "name"), ROLES_OF_LAYOUTS)
def test_an_illegal_layout_is_refused(
    baton: RunBaton,
    tmp_path: Path,
    role: Role,
    name: str,
    command: str,
) -> None:
    axes, messages = ILLEGAL[name]
    said = [message.format(path=f"{role}.parallel") for message in messages]
    assert baton(command, write_file(tmp_path, role, axes)) == (2, "", "".join(f"{line}\n" for line in said))


@pytest.mark.parametrize(("role", "name"), ROLES_OF_MODELS)
def test_a_layout_that_is_not_of_this_model_is_refused(baton: RunBaton, tmp_path: Path, role: Role, name: str) -> None:
    model, axes, messages = NOT_OF_THIS_MODEL[name]
    (tmp_path / "config.json").write_text(json.dumps(MODELS[model]))
    said = [message.format(path=f"{role}.parallel") for message in messages]
    file = write_file(tmp_path, role, axes, model={"path": str(tmp_path)})
    assert baton("plan", file) == (2, "", "".join(f"{line}\n" for line in said))
    config = load_config(Path(file), {})
    with pytest.raises(ConfigError) as at_start:
        check_model(config, tmp_path, lambda _: None)
    assert str(at_start.value).splitlines() == said
    pool = config.prefill if role is Role.PREFILL else config.decode
    with pytest.raises(UserError) as in_worker:
        read_model_config(tmp_path).check_layout(pool.parallel, f"{role}.parallel")
    assert str(in_worker.value) == "; ".join(said)


def test_a_ring_is_refused_for_a_model_with_sliding_windows(baton: RunBaton, tmp_path: Path) -> None:
    windowed = {"architectures": ["MistralForCausalLM"], "sliding_window": 8}
    (tmp_path / "config.json").write_text(json.dumps({**MODELS["dense"], **windowed}))
    message = "prefill.mode: got ring with cp = 2; allowed: gather, since the model has sliding windows"
    ring = {"model": {"path": str(tmp_path)}, "transfer": {"mode": "all_ranks"}}
    file = tmp_path / "f.yaml"
    file.write_text(json.dumps({"prefill": {"parallel": {"cp": 2}, "mode": "ring"}, **ring}))
    assert baton("plan", str(file)) == (2, "", f"{message}\n")
    config = load_config(file, {})
    with pytest.raises(ConfigError, match=message):
        check_model(config, tmp_path, lambda _: None)
    with pytest.raises(UserError, match=message):
        read_model_config(tmp_path).check_ring(config.prefill)


sizes = st.integers(1, 8)


@given(
    parallel=st.builds(ParallelConfig, tp=sizes, pp=sizes, ep=sizes, moe_dp=sizes),
    num_kv_heads=sizes,
    heads_per_kv_head=sizes,
    num_layers=sizes,
    num_experts=st.none() | sizes,
)
def test_illegal_layouts_of_a_model_follow_from_its_config(
    parallel: ParallelConfig, num_kv_heads: int, heads_per_kv_head: int, num_layers: int, num_experts: int | None
) -> None:
    num_heads = num_kv_heads * heads_per_kv_head
    model = ModelLimits(num_heads=num_heads, num_kv_heads=num_kv_heads, num_layers=num_layers, num_experts=num_experts)
    shares_heads = num_heads % parallel.tp == 0 and (num_kv_heads % parallel.tp == 0 or parallel.tp % num_kv_heads == 0)
    shares_experts = parallel.ep == parallel.moe_dp == 1 if num_experts is None else num_experts % parallel.ep == 0
    is_legal = shares_heads and shares_experts and parallel.pp <= num_layers
    assert is_legal == (not layout_problems(parallel, "p", model))
