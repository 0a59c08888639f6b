"""Deploy files: what is accepted, and the errors for everything else."""

import json
from pathlib import Path

import pytest

from cluster.cli.plan import schema_text
from cluster.spec import loader
from cluster.spec.config import DeployConfig, Device, TransferBackendName
from cluster.spec.errors import ConfigError
from cluster.spec.loader import load_config, parse_config
from cluster.spec.registry import KvOwnership, TransferMode
from cluster.spec.strategy import StrategySetting

DEPLOY = Path(__file__).parents[3] / "deploy"
TOPOLOGIES = sorted(file for file in DEPLOY.glob("*.yaml") if file.stem != "job")
TOP_KEYS = "name, model, kv, prefill, decode, hicache, transfer, router, resources"
WHOLE_FROM_1 = "allowed: a whole number, 1 or more"
TEXT = "allowed: a non-empty string, in quotes if it looks like a number"

BAD_FILES = {
    "unknown top key": ("sharding: {}", [f"sharding: unknown key; allowed: {TOP_KEYS}"]),
    "misspelt key": ("prefil: {}", [f"prefil: unknown key; did you mean prefill? allowed: {TOP_KEYS}"]),
    "misspelt nested key": (
        "prefill: {parallel: {ccp: 2}}",
        ["prefill.parallel.ccp: unknown key; did you mean cp? allowed: dp, tp, pp, ep, cp, moe_dp"],
    ),
    "dotted key": (
        "prefill.replicas: 2",
        [f"prefill.replicas: unknown key; did you mean prefill? allowed: {TOP_KEYS}"],
    ),
    "key that decode does not have": (
        "decode: {parallel: {cp: 2}}",
        ["decode.parallel.cp: decode has no context parallelism, since a step computes one token per request"],
    ),
    "number as key": ("1: {2: 3}", [f"1: unknown key; allowed: {TOP_KEYS}"]),
    "word that YAML reads as true": ("on: 3", [f"on: unknown key; allowed: {TOP_KEYS}"]),
    "text for a number": (
        "prefill: {parallel: {cp: two}}",
        [f"prefill.parallel.cp: got 'two'; {WHOLE_FROM_1}"],
    ),
    "number in quotes": ("prefill: {max_requests: '2'}", [f"prefill.max_requests: got '2'; {WHOLE_FROM_1}"]),
    "yes for a number": ("kv: {page_size: yes}", [f"kv.page_size: got true; {WHOLE_FROM_1}"]),
    "nothing for a number": ("kv: {page_size: }", [f"kv.page_size: got nothing; {WHOLE_FROM_1}"]),
    "list for a number": ("kv: {page_size: [64]}", [f"kv.page_size: got a list; {WHOLE_FROM_1}"]),
    "step too large for any memory": (
        "prefill: {chunk_tokens: 1000000000}",
        ["prefill.chunk_tokens: got 1000000000; allowed: a whole number from 1 to 16777216"],
    ),
    "zero": ("decode: {replicas: 0}", ["decode.replicas: got 0; allowed: a whole number from 1 to 4096"]),
    "negative memory": ("kv: {memory_gib: -1}", ["kv.memory_gib: got -1; allowed: a number over 0, at most 65536"]),
    "infinite memory": ("kv: {memory_gib: .inf}", ["kv.memory_gib: got inf; allowed: a number over 0, at most 65536"]),
    "no number": ("kv: {memory_gib: .nan}", ["kv.memory_gib: got nan; allowed: a number over 0, at most 65536"]),
    "no time": ("router: {drain_s: 0}", ["router.drain_s: got 0; allowed: a number over 0, at most 1000000"]),
    "time past all clocks": (
        "resources: {start_timeout_s: 1.0e+11}",
        ["resources.start_timeout_s: got 100000000000.0; allowed: a number over 0, at most 1000000"],
    ),
    "negative cpus": (
        "resources: {cpus_per_worker: -0.5}",
        ["resources.cpus_per_worker: got -0.5; allowed: a number, 0 or more"],
    ),
    "port": ("router: {port: 70000}", ["router.port: got 70000; allowed: a whole number from 0 to 65535"]),
    "strategy": (
        "prefill: {strategy: zigag}",
        ["prefill.strategy: got 'zigag'; allowed: auto, none, whole_request, contiguous, zigzag, interleave"],
    ),
    "router wait": (
        "router: {max_wait_s: 20, request_timeout_s: 10}",
        ["router.max_wait_s: got 20.0; allowed: less than router.request_timeout_s = 10.0"],
    ),
    "empty text": ("model: {path: ''}", [f"model.path: got ''; {TEXT}"]),
    "cluster name": (
        "name: My_Cluster",
        ["name: got 'My_Cluster'; allowed: 1 to 63 lowercase letters, digits and dashes, no dash at either end"],
    ),
    "list for a section": (
        "kv: [1]",
        ["kv: got a list; allowed: keys and values, with the keys page_size, memory_gib"],
    ),
    "nothing for a section": (
        "kv:",
        ["kv: got nothing; allowed: keys and values, with the keys page_size, memory_gib"],
    ),
    "long text": (f"name: {'A' * 200}", [f"name: got '{'A' * 60}...'; "]),
    "passing without a ring": (
        "prefill: {parallel: {cp: 2}, passing: pass_q}",
        ["prefill.passing: got pass_q with prefill.mode = gather; allowed: auto, since only ring mode passes Q or KV"],
    ),
    "passing in a ring of one rank": (
        "prefill: {mode: ring, passing: pass_kv}",
        ["prefill.passing: got pass_kv with prefill.parallel.cp = 1; allowed: auto, since a ring needs two ranks"],
    ),
    "projections that no other rank can store": (
        "prefill: {parallel: {tp: 2}, shard_linear: gather}",
        [
            "prefill.shard_linear: got gather with prefill.parallel.cp = 1; "
            "allowed: none, since no other rank could store them"
        ],
    ),
    "projections stored in an unknown way": (
        "prefill: {parallel: {cp: 2}, shard_linear: off}",
        ["prefill.shard_linear: got false; allowed: none, broadcast, gather"],
    ),
    "pages that flash_attn does not read": (
        "resources: {device: cuda, attention: flash_attn}",
        ["kv.page_size: got 64 with resources.attention = flash_attn; allowed: multiples of 256"],
    ),
    "attention of another device": (
        "resources: {device: cpu, attention: triton}",
        ["resources.attention: got triton with resources.device = cpu; allowed: auto, native, torch"],
    ),
    "projections on decode": (
        "decode: {shard_linear: gather}",
        ["decode.shard_linear: unknown key; allowed: "],
    ),
    "a ring that rank 0 should send": (
        "prefill: {parallel: {cp: 2}, mode: ring}\ntransfer: {mode: rank0}",
        [
            "transfer.mode: got rank0 with prefill.mode = ring and cp = 2; "
            "allowed: all_ranks, since rank 0 holds only its own pages"
        ],
    ),
    "storage without host memory": (
        "hicache: {storage: {backend: files}}",
        [
            "hicache.storage.backend: got files with hicache.host_gib = 0.0 and kv.prefix_cache = true; "
            "allowed: none; other backends need hicache.host_gib above 0 and kv.prefix_cache = true"
        ],
    ),
    "when to write to what is not there": (
        "hicache: {write: write_back}",
        [
            "hicache.write: got write_back with hicache.host_gib = 0; "
            "allowed: write_through; other policies need hicache.host_gib above 0"
        ],
    ),
    "storage somewhere": (
        "hicache: {host_gib: 1, storage: {backend: files, folder: kv}}",
        ["hicache.storage.folder: got kv; allowed: a path that begins with / or ~/"],
    ),
    "storage at somebody's": (
        "hicache: {host_gib: 1, storage: {backend: files, folder: ~nobody/kv}}",
        ["hicache.storage.folder: got ~nobody/kv; allowed: a path that begins with / or ~/"],
    ),
    "a master without a port": (
        "hicache: {host_gib: 1, storage: {backend: mooncake_store, master: foo}}",
        ["hicache.storage.master: got foo; allowed: host:port with a port from 1 to 65535, such as 127.0.0.1:50051"],
    ),
    "silence": (
        "resources: {silence_s: 3}",
        ["resources.silence_s: got 3.0; allowed: more than 3.0, the silence after which a replica gets no requests"],
    ),
    "a loop that idles": (
        "resources: {step_timeout_s: 1}",
        ["resources.step_timeout_s: got 1; allowed: a number from 5 to 1000000"],
    ),
    "key twice": (
        "kv: {}\nname: a\nkv: {page_size: 8}",
        ["kv: given twice, on lines 1 and 3; allowed: once"],
    ),
    "empty file": ("# nothing yet\n", ["f.yaml: is empty; allowed: keys and values, or {} for all defaults"]),
    "list": ("- name", ["f.yaml: got a list; allowed: keys and values, or {} for all defaults"]),
    "text": ("hello", ["f.yaml: got 'hello'; allowed: keys and values, or {} for all defaults"]),
    "not YAML": ("name: a\nkv: b: c\n", ["f.yaml: line 2, column 6: not YAML: mapping values are not allowed here"]),
    "unclosed": ("kv: {page_size: 1", ["f.yaml: line 1, column 18: not YAML: expected ',' or '}'"]),
    "two documents": ("name: a\n---\nname: b\n", ["f.yaml: line 2, column 1: not YAML: but found another document"]),
    "Python object": (
        "name: !!python/object:os.system {}",
        ["f.yaml: line 1, column 7: not YAML: could not determine a constructor for the tag"],
    ),
    "bad character": ("a\0b", ["f.yaml: not YAML: unacceptable character"]),
    "endless nesting": ("[" * 5000, ["f.yaml: holds a value that cannot be read: maximum recursion depth"]),
    "mapping in itself": ("&a {b: *a}", [f"b: unknown key; allowed: {TOP_KEYS}"]),
    "impossible date": ("name: 2024-13-41", ["f.yaml: holds a value that cannot be read: month must be in 1..12"]),
}


@pytest.mark.parametrize(("text", "messages"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_bad_file_is_refused_with_a_reason(text: str, messages: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "f.yaml")
    lines = str(caught.value).splitlines()
    assert len(lines) == len(messages)
    for line, message in zip(lines, messages, strict=True):
        assert line.startswith(message)


def test_all_problems_are_reported_together() -> None:
    text = """
        nmae: x
        kv: {page_size: many}
        prefill: {parallel: {cp: 2, ep: 3}, strategy: zag}
        decode: {parallel: {tp: 2, tp: 4}}
        resources: {silence_s: 0.5}
    """
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "f.yaml")
    assert [problem.path for problem in caught.value.problems] == [
        "decode.parallel.tp",
        "kv.page_size",
        "prefill.strategy",
        "nmae",
        "prefill.parallel",
        "resources.silence_s",
    ]


def test_rules_do_not_apply_to_defaults() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(
            "router: {request_timeout_s: often, max_wait_s: 9999}\nprefill: {parallel: {cp: x, ep: 8}}", "f.yaml"
        )
    assert [problem.path for problem in caught.value.problems] == ["prefill.parallel.cp", "router.request_timeout_s"]


def test_defaults_and_values_are_read() -> None:
    config = parse_config(
        "name: big\nmodel: {path: /models/Qwen3-8B/}\nprefill: {parallel: {cp: 4}, strategy: interleave}\n"
        "transfer: {backend: mooncake, mode: rank0}\nresources: {device: cuda, cpus_per_worker: 0}",
        "f.yaml",
    )
    assert config.model.name == "Qwen3-8B"
    assert (config.prefill.parallel.cp, config.prefill.strategy) == (4, StrategySetting.INTERLEAVE)
    assert (config.transfer.backend, config.transfer.mode) == (TransferBackendName.MOONCAKE, TransferMode.RANK0)
    assert (config.resources.device, config.resources.cpus_per_worker) == (Device.CUDA, 0.0)
    assert config.decode == DeployConfig().decode


@pytest.mark.parametrize(
    ("text", "ownership"),
    [
        ("prefill: {parallel: {cp: 2}}", KvOwnership.REPLICATED),
        ("prefill: {parallel: {cp: 2}, mode: ring}", KvOwnership.SHARDED),
        ("prefill: {mode: ring}\ntransfer: {mode: rank0}", KvOwnership.REPLICATED),
    ],
    ids=["gather", "ring", "a ring of one rank is no ring"],
)
def test_a_ring_shards_kv_over_its_ranks(text: str, ownership: KvOwnership) -> None:
    config = parse_config(text, "f.yaml")
    assert config.prefill.ownership is ownership
    assert config.prefill.num_owners == (2 if ownership is KvOwnership.SHARDED else 1)
    assert config.decode.ownership is KvOwnership.REPLICATED


def test_merged_sections_are_not_keys_given_twice() -> None:
    config = parse_config("prefill: &p {replicas: 2}\ndecode: {<<: *p, max_requests: 3}", "f.yaml")
    assert (config.decode.replicas, config.decode.max_requests) == (2, 3)


def test_overrides_win_over_the_file() -> None:
    overrides = {"model.path": "Qwen/Qwen3-0.6B", "kv.page_size": "16", "router.port": "0"}
    config = parse_config("model: {path: recall}\nkv:\n", "f.yaml", overrides)
    assert (config.model.path, config.kv.page_size, config.router.port) == ("Qwen/Qwen3-0.6B", 16, 0)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("modle.path", "x", f"modle: unknown key; did you mean model? allowed: {TOP_KEYS}"),
        ("kv.page_size", "big", f"kv.page_size: got 'big'; {WHOLE_FROM_1}"),
        ("model.path", "", f"model.path: got nothing; {TEXT}"),
        ("kv.page_size", "[1, 2]", f"kv.page_size: got '[1, 2]'; {WHOLE_FROM_1}"),
        ("kv.page_size", "a: b: c", f"kv.page_size: got 'a: b: c'; {WHOLE_FROM_1}"),
        ("name.first", "x", "name: got a mapping; allowed: 1 to 63 lowercase letters"),
    ],
)
def test_bad_override_is_refused_like_the_file(key: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config("{}", "f.yaml", {key: value})
    assert str(caught.value).startswith(message)


def test_override_does_not_hide_a_section_of_the_wrong_type() -> None:
    with pytest.raises(ConfigError, match="kv: got 3; allowed: keys and values"):
        parse_config("kv: 3", "f.yaml", {"kv.page_size": "16"})


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"name: \xff")
    for path, reason in (
        (tmp_path / "none.yaml", "no such file"),
        (tmp_path, "cannot be read: Is a directory"),
        (binary, "byte 6 is not UTF-8 text"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_config(path)
        assert str(caught.value) == f"{path}: {reason}"


@pytest.mark.parametrize("file", TOPOLOGIES, ids=lambda file: file.stem)
def test_committed_topology_is_legal_and_has_a_description(file: Path) -> None:
    config = load_config(file)
    assert config.name == file.stem
    comments = [line for line in file.read_text().splitlines() if line.startswith("#")]
    assert any(line.startswith("# Machine: ") for line in comments)


def test_schema_describes_every_key() -> None:
    definitions = json.loads(schema_text())["$defs"]
    sections = [definition for definition in definitions.values() if "properties" in definition]
    assert len(sections) == 12
    assert all("description" in key for section in sections for key in section["properties"].values())


def test_built_in_files_have_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(loader, "BUILT_IN_FOLDERS", [tmp_path / "none", DEPLOY])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "local-cpu").mkdir()
    for name in ("local-cpu", "local-cpu.yaml"):
        assert load_config(Path(name)) == load_config(DEPLOY / "local-cpu.yaml")
    with pytest.raises(ConfigError) as refused:
        load_config(Path("nowhere"))
    assert str(refused.value) == f"nowhere: no such file; built-in files: {', '.join(file.stem for file in TOPOLOGIES)}"
