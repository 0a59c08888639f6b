"""Everything that reads bytes from outside: valid inputs to begin with, and the errors that it may raise.

A target returns or raises only what its decoder promises. Any other error, a hang or unbounded memory is a finding.
"""

import atexit
import contextlib
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec
import yaml
from fastapi import HTTPException
from safetensors.torch import save

from cluster.bench.dataset import read_trace
from cluster.bench.endpoint import EndpointError, error_message, parse_line
from cluster.bootstrap.service import decode_body
from cluster.bootstrap.table import BootstrapTable, TableRefusedError
from cluster.channel import decode, encode
from cluster.cli.control import decode_command
from cluster.spec.errors import ConfigError, UserError
from cluster.spec.ids import Incarnation, ReplicaId
from cluster.spec.registry import Heartbeat, RankRecord, ReplicaLoad
from cluster.spec.router_config import RouterConfig
from cluster.spec.wire import TokenIds
from cluster.supervisor.commands import DrainCommand, RestartCommand, ResumeCommand, ScaleCommand, StatusCommand
from cluster.supervisor.events import Tick
from router.api_keys import read_keys
from router.errors import ApiError
from router.preprocess.body import Body, parse
from router.preprocess.requests import ChatRequest, CompletionRequest
from router.preprocess.response_request import ResponseRequest
from tests.fakes.rank_records import make_record, make_records, sizes
from tests.fakes.supervised import Run
from tests.fuzz.http_surface import HTTP, BootstrapSurface, heads, requests, surface
from tests.fuzz.mutate import Codec
from tests.fuzz.samples import messages
from tests.readme import ROOT
from workers.engine.checkpoint_files import CheckpointError, stored_tensors
from workers.models.interface import UnsupportedModelError
from workers.models.registry import read_model_config

JSON = Codec(json.loads, lambda tree: json.dumps(tree).encode())
JSON_LINES = Codec(
    lambda data: [json.loads(line) for line in data.splitlines()],
    lambda tree: b"\n".join(json.dumps(line).encode() for line in tree),
)
MSGPACK = Codec(msgspec.msgpack.decode, msgspec.msgpack.encode)
YAML = Codec(yaml.safe_load, lambda tree: yaml.safe_dump(tree).encode())


@dataclass(frozen=True)
class Target:
    """One decoder."""

    seeds: Callable[[], list[bytes]]
    feed: Callable[[bytes], None]
    codec: Codec | None = None


# ---- frames of the channel


def _feed_frame(data: bytes) -> None:
    with contextlib.suppress(msgspec.DecodeError):
        frame = encode(decode(data))
        assert encode(decode(frame)) == frame, "read again it is another message"


# ---- bodies of the bootstrap service


def _feed_record(data: bytes) -> None:
    table = BootstrapTable(lease_s=3.0)
    with contextlib.suppress(HTTPException, TableRefusedError):
        record = decode_body(data, RankRecord)
        table.register(record)
        table.register(record)
    msgspec.msgpack.encode(table.snapshot(0.0))


def _feed_heartbeat(data: bytes) -> None:
    table = BootstrapTable(lease_s=3.0)
    table.register(make_record("prefill-0", 0, sizes()))
    with contextlib.suppress(HTTPException, TableRefusedError):
        table.heartbeat(decode_body(data, Heartbeat), 0.0)
    msgspec.msgpack.encode(table.snapshot(0.0))


def _heartbeats() -> list[bytes]:
    beat = Heartbeat(
        replica=ReplicaId("prefill-0"), incarnation=Incarnation(1), records_digest="x", load=ReplicaLoad(num_running=3)
    )
    return [msgspec.json.encode(beat)]


# ---- commands to a running cluster


def _feed_command(data: bytes) -> None:
    """Check that the supervisor carries out a command or explains its refusal, and continues."""
    command = decode_command(data)
    if command is None:
        return
    run = Run(("bootstrap", "router", "prefill-0", "prefill-1", "decode-0", "decode-1")).serve()
    run.command(command)
    run.now_s += 1.0
    run.step(Tick())


def _orders() -> list[bytes]:
    one = ReplicaId("decode-0")
    commands = [
        ScaleCommand(prefill=2, decode=3, grace_s=1.5),
        RestartCommand(replicas=(one,), is_rolling=True),
        DrainCommand(replica=one, grace_s=2.5),
        ResumeCommand(replica=one),
        StatusCommand(),
    ]
    return [msgspec.json.encode(command) for command in commands]


# ---- bodies of the router

_SCHEMAS: tuple[type[Body], ...] = (CompletionRequest, ChatRequest, ResponseRequest)
_BODIES = (
    {"model": "m", "prompt": "abc", "max_tokens": 3, "stop": ["a"], "logit_bias": {"3": 1}, "stream": True, "n": 2},
    {
        "model": "m",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
    },
    {"model": "m", "prompt": [151_000] * 400},
    {"model": "m", "input": [{"role": "user", "content": "hello"}]},
)


def _feed_body(data: bytes) -> None:
    for schema in _SCHEMAS:
        with contextlib.suppress(ApiError):
            body = parse(data, schema)
            ids = getattr(body, schema.ids_field) if schema.ids_field else None
            if isinstance(ids, TokenIds):
                assert getattr(schema.model_validate_json(data), str(schema.ids_field)) == [*ids]


# ---- files


@cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="baton-fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _file(name: str, data: bytes) -> Path:
    path = _folder() / name
    path.write_bytes(data)
    return path


def _feed_yaml(data: bytes) -> None:
    from cluster.spec.loader import load_config

    with contextlib.suppress(ConfigError):
        load_config(_file("deploy.yaml", data))


def _feed_keys(data: bytes) -> None:
    with contextlib.suppress(UserError):
        read_keys(RouterConfig(api_keys_file=str(_file("keys.yaml", data))), {})


def _feed_trace(data: bytes) -> None:
    with contextlib.suppress(UserError):
        read_trace(_file("trace.jsonl", data))


def _feed_config(data: bytes) -> None:
    _file("config.json", data)
    with contextlib.suppress(UnsupportedModelError):
        read_model_config(_folder())


def _feed_weights(data: bytes) -> None:
    path = _file("model.safetensors", data)
    try:
        with contextlib.suppress(CheckpointError):
            stored_tensors(_folder())
    finally:
        path.unlink()


def _feed_index(data: bytes) -> None:
    _file("model.safetensors.index.json", data)
    with contextlib.suppress(CheckpointError):
        stored_tensors(_folder())


def _weights() -> list[bytes]:
    import torch

    return [save({"a.weight": torch.zeros(2, 3), "b": torch.ones(1, dtype=torch.bfloat16)})]


_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 99, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16", "eos_token_id": [1, 2], "layer_types": ["full_attention"],
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0},
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
}  # fmt: skip
_TRACE = b'{"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]}\n' * 2


# ---- streams


def _feed_sse(data: bytes) -> None:
    text = data.decode(errors="replace")
    error_message(text)
    for line in text.splitlines():
        with contextlib.suppress(ValueError, EndpointError):
            parse_line(line)


TARGETS: dict[str, Target] = {
    "frames": Target(lambda: [encode(message) for message in messages()], _feed_frame, MSGPACK),
    "records": Target(
        lambda: [msgspec.json.encode(record) for record in make_records("prefill-0", sizes(cp=2))], _feed_record, JSON
    ),
    "heartbeats": Target(_heartbeats, _feed_heartbeat, JSON),
    "bodies": Target(lambda: [json.dumps(body).encode() for body in _BODIES], _feed_body, JSON),
    "http": Target(requests, lambda data: surface().feed(data), HTTP),
    "heads": Target(heads, lambda data: surface().feed_parts(data)),
    "bootstrap": Target(heads, lambda data: surface(BootstrapSurface).feed_parts(data)),
    "commands": Target(_orders, _feed_command, JSON),
    "yaml": Target(lambda: [path.read_bytes() for path in sorted(ROOT.glob("deploy/local-*.yaml"))], _feed_yaml, YAML),
    "keys": Target(lambda: [b"- {name: a, key: a-long-secret, priority: 5}\n"], _feed_keys, YAML),
    "trace": Target(lambda: [_TRACE], _feed_trace, JSON_LINES),
    "sse": Target(lambda: [b'data: {"choices": [{"delta": {"content": "x"}}]}\n\n: c\n\ndata: [DONE]\n'], _feed_sse),
    "config": Target(lambda: [json.dumps(_CONFIG).encode()], _feed_config, JSON),
    "weights": Target(_weights, _feed_weights),
    "index": Target(lambda: [b'{"weight_map": {"a": "model-1.safetensors", "b": "x"}}'], _feed_index, JSON),
}
