"""Rules between the keys of a deploy YAML, and between its parallel sizes and a model."""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from cluster.spec.clock import LEASE_S
from cluster.spec.config import DeployConfig, ParallelConfig, PrefillConfig, TransferBackendName, TransferProtocol
from cluster.spec.errors import Problem
from cluster.spec.hicache_config import LEAST_LENT_GIB, StorageBackendName, WritePolicy
from cluster.spec.ranks import axis_problems
from cluster.spec.registry import KvOwnership, TransferMode
from cluster.spec.strategy import CpMode, PassingSetting

_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})")
_LAST_PORT = 65535


@dataclass(frozen=True, slots=True)
class Check:
    """One rule between keys."""

    rule: str
    """The rule as a sentence without a full stop."""
    keys: tuple[str, ...]
    """Dotted paths that the rule reads; a path stands for everything under it."""
    find: Callable[[DeployConfig], list[Problem]]
    """Function that returns the ways in which a configuration breaks the rule."""


def config_problems(config: DeployConfig, unreadable: Collection[str] = ()) -> list[Problem]:
    """Return every violation, except of rules that read an unreadable key."""
    return [problem for check in CHECKS if not _reads(check, unreadable) for problem in check.find(config)]


def _reads(check: Check, paths: Collection[str]) -> bool:
    return any(_overlap(key, path) for key in check.keys for path in paths)


def _overlap(key: str, path: str) -> bool:
    return f"{key}.".startswith(f"{path}.") or f"{path}.".startswith(f"{key}.")


def _prefill_axes(config: DeployConfig) -> list[Problem]:
    return axis_problems(config.prefill.parallel, "prefill.parallel")


def _decode_axes(config: DeployConfig) -> list[Problem]:
    return axis_problems(config.decode.parallel, "decode.parallel")


def _decode_cp(config: DeployConfig) -> list[Problem]:
    cp = config.decode.parallel.cp
    if cp == 1:
        return []
    message = f"got {cp}; allowed: 1, since a decode step has one query token a request and nothing to share over cp"
    return [Problem("decode.parallel.cp", message)]


def _passing(config: DeployConfig) -> list[Problem]:
    prefill = config.prefill
    if prefill.ownership is KvOwnership.SHARDED or prefill.passing is PassingSetting.AUTO:
        return []
    why = f"prefill.mode = {prefill.mode}; allowed: auto, since only ring mode passes Q or KV"
    if prefill.mode is CpMode.RING:
        why = "prefill.parallel.cp = 1; allowed: auto, since a ring needs two ranks"
    message = f"got {prefill.passing} with {why}"
    return [Problem("prefill.passing", message)]


def _protocol(config: DeployConfig) -> list[Problem]:
    transfer = config.transfer
    if transfer.backend is TransferBackendName.MOONCAKE or transfer.protocol is TransferProtocol.TCP:
        return []
    message = f"got {transfer.protocol} with transfer.backend = {transfer.backend}; allowed: tcp, or backend mooncake"
    return [Problem("transfer.protocol", message)]


def _ring_transfer(config: DeployConfig) -> list[Problem]:
    prefill, transfer = config.prefill, config.transfer
    if prefill.ownership is KvOwnership.REPLICATED:
        return []
    if transfer.mode is TransferMode.ALL_RANKS:
        return []
    why = f"with prefill.mode = ring and cp = {prefill.parallel.cp}"
    message = f"got {transfer.mode} {why}; allowed: all_ranks, since rank 0 holds only its own pages"
    return [Problem("transfer.mode", message)]


def _silence(config: DeployConfig) -> list[Problem]:
    silence_s = config.resources.silence_s
    if silence_s > LEASE_S:
        return []
    message = f"got {silence_s}; allowed: more than {LEASE_S}, after which a silent replica gets no more requests"
    return [Problem("resources.silence_s", message)]


def _storage(config: DeployConfig) -> list[Problem]:
    hicache, backend = config.hicache, config.hicache.storage.backend
    if backend is StorageBackendName.NONE or (hicache.has_host and config.kv.prefix_cache):
        return []
    given = f"hicache.host_gib = {hicache.host_gib} and kv.prefix_cache = {str(config.kv.prefix_cache).lower()}"
    message = (
        f"got {backend} with {given}; allowed: none, or host memory and the prefix cache, which pages pass through"
    )
    return [Problem("hicache.storage.backend", message)]


def _write(config: DeployConfig) -> list[Problem]:
    hicache = config.hicache
    if hicache.has_host or hicache.write is WritePolicy.WRITE_THROUGH:
        return []
    message = (
        f"got {hicache.write} with hicache.host_gib = {hicache.host_gib:g}; allowed: write_through, or host memory"
    )
    return [Problem("hicache.write", message)]


def _storage_folder(config: DeployConfig) -> list[Problem]:
    folder = config.hicache.storage.folder
    if folder is None or folder == "~" or folder.startswith(("/", "~/")):
        return []
    return [Problem("hicache.storage.folder", f"got {folder}; allowed: a path that begins with / or ~/, on every host")]


def _lent(config: DeployConfig) -> list[Problem]:
    storage = config.hicache.storage
    is_lender = storage.backend is StorageBackendName.MOONCAKE_STORE and storage.lent_gib > 0
    if not is_lender or storage.lent_gib >= LEAST_LENT_GIB:
        return []
    message = f"got {storage.lent_gib}; allowed: 0, or {LEAST_LENT_GIB} (16 MiB) and more, which Mooncake Store can use"
    return [Problem("hicache.storage.lent_gib", message)]


def _master(config: DeployConfig) -> list[Problem]:
    storage = config.hicache.storage
    if storage.backend is not StorageBackendName.MOONCAKE_STORE:
        return []
    match = _ADDRESS.fullmatch(storage.master)
    if match is not None and 1 <= int(match["port"]) <= _LAST_PORT:
        return []
    message = f"got {storage.master}; allowed: host:port with a port from 1 to {_LAST_PORT}, such as 127.0.0.1:50051"
    return [Problem("hicache.storage.master", message)]


def _router_wait(config: DeployConfig) -> list[Problem]:
    wait_s, timeout_s = config.router.max_wait_s, config.router.request_timeout_s
    if wait_s < timeout_s:
        return []
    message = f"got {wait_s}; allowed: less than router.request_timeout_s = {timeout_s}"
    return [Problem("router.max_wait_s", message)]


def _prompt_limit(config: DeployConfig) -> list[Problem]:
    longest, context = config.router.max_prompt_tokens, config.model.max_context
    if longest is None or context is None or longest < context:
        return []
    message = f"got {longest}; allowed: less than model.max_context = {context}, which includes the answer"
    return [Problem("router.max_prompt_tokens", message)]


CHECKS = (
    Check("the axes of a prefill replica fit together", ("prefill.parallel",), _prefill_axes),
    Check("the axes of a decode replica fit together", ("decode.parallel",), _decode_axes),
    Check("decode runs without context parallelism", ("decode.parallel.cp",), _decode_cp),
    Check(
        "only ring mode has a choice of what ranks pass on",
        ("prefill.mode", "prefill.passing", "prefill.parallel.cp"),
        _passing,
    ),
    Check(
        "in ring mode every rank sends its own pages",
        ("prefill.mode", "prefill.parallel.cp", "transfer.mode"),
        _ring_transfer,
    ),
    Check("only mooncake supports RDMA", ("transfer.backend", "transfer.protocol"), _protocol),
    Check("ranks may be silent for longer than a lease", ("resources.silence_s",), _silence),
    Check(
        "the wait in the router is shorter than the request timeout",
        ("router.max_wait_s", "router.request_timeout_s"),
        _router_wait,
    ),
    Check(
        "the longest prompt leaves room for an answer", ("router.max_prompt_tokens", "model.max_context"), _prompt_limit
    ),
    Check(
        "storage needs host memory and the prefix cache",
        ("hicache.host_gib", "hicache.storage.backend", "kv.prefix_cache"),
        _storage,
    ),
    Check("a write policy needs host memory", ("hicache.host_gib", "hicache.write"), _write),
    Check("the storage folder is an absolute path", ("hicache.storage.folder",), _storage_folder),
    Check(
        "the Mooncake Store master has a valid address", ("hicache.storage.master", "hicache.storage.backend"), _master
    ),
    Check(
        "Mooncake Store can use the memory it is given", ("hicache.storage.lent_gib", "hicache.storage.backend"), _lent
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """Sizes of a model that ranks must be able to share."""

    num_heads: int
    """Query heads."""
    num_kv_heads: int
    num_layers: int
    num_experts: int | None
    """Experts of a layer; None in dense models."""
    has_windows: bool = False
    """True if tokens of some layer see only the latest ones."""


def layout_problems(parallel: ParallelConfig, path: str, model: ModelLimits) -> list[Problem]:
    """Return axes that are legal in themselves but not for this model; ``path`` is their place in the file."""
    tp, pp = parallel.tp, parallel.pp
    problems = []
    if model.num_heads % tp:
        message = f"got {tp}; allowed: a divisor of the model's {model.num_heads} heads"
        problems.append(Problem(f"{path}.tp", message))
    elif model.num_kv_heads % tp and tp % model.num_kv_heads:
        message = f"got {tp}; allowed: a divisor or a multiple of the model's {model.num_kv_heads} KV heads"
        problems.append(Problem(f"{path}.tp", message))
    problems += _expert_problems(parallel, path, model.num_experts)
    if pp > model.num_layers:
        problems.append(Problem(f"{path}.pp", f"got {pp}; allowed: at most the model's {model.num_layers} layers"))
    return problems


def ring_problems(prefill: PrefillConfig, model: ModelLimits) -> list[Problem]:
    """Return the problem of a ring with sliding windows, each of which needs adjacent pages on one rank."""
    if prefill.ownership is KvOwnership.REPLICATED or not model.has_windows:
        return []
    message = (
        f"got {prefill.mode} with cp = {prefill.parallel.cp}; allowed: gather, since the model has sliding windows"
    )
    return [Problem("prefill.mode", message)]


def _expert_problems(parallel: ParallelConfig, path: str, num_experts: int | None) -> list[Problem]:
    if num_experts is None:
        return [
            Problem(f"{path}.{axis}", f"got {size}; allowed: 1, since the model has no experts")
            for axis, size in (("ep", parallel.ep), ("moe_dp", parallel.moe_dp))
            if size > 1
        ]
    if num_experts % parallel.ep:
        return [Problem(f"{path}.ep", f"got {parallel.ep}; allowed: a divisor of the model's {num_experts} experts")]
    return []
