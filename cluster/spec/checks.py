"""Rules that relate keys of a deploy file to each other, and its parallel sizes to a model."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from cluster.spec.clock import LEASE_S
from cluster.spec.config import (
    AnyParallel,
    AttentionSetting,
    DeployConfig,
    Device,
    PrefillConfig,
    TransferBackendName,
    TransferProtocol,
)
from cluster.spec.errors import Problem
from cluster.spec.hicache_config import StorageBackendName, WritePolicy
from cluster.spec.ranks import axis_problems
from cluster.spec.registry import KvOwnership, TransferMode
from cluster.spec.strategy import CpMode, PassingSetting, ShardLinear

_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})")
_LAST_PORT = 65535
ATTENTION_DEVICES = {
    AttentionSetting.NATIVE: Device.CPU,
    AttentionSetting.TRITON: Device.CUDA,
    AttentionSetting.FLASH_ATTN: Device.CUDA,
}
"""Device of each attention backend that does not run on all."""
_FLASH_ATTN_PAGE = 256
"""Number that divides every page size of the flash_attn package's kernels."""


Find = Callable[[DeployConfig], Iterable[Problem]]


@dataclass(frozen=True, slots=True)
class Check:
    rule: str
    """The rule as a sentence without a full stop."""
    keys: tuple[str, ...]
    """Dotted paths that the rule reads; a path stands for everything under it."""
    find: Find
    """Function that yields the problems of a configuration that breaks the rule."""


CHECKS: list[Check] = []
"""All rules, in the order in which their problems are shown."""


def config_problems(config: DeployConfig, unreadable: Collection[str] = ()) -> list[Problem]:
    """Return every violation, except those of rules that read an unreadable key."""
    return [problem for check in CHECKS if not _reads(check, unreadable) for problem in check.find(config)]


def _reads(check: Check, paths: Collection[str]) -> bool:
    return any(_overlap(key, path) for key in check.keys for path in paths)


def _overlap(key: str, path: str) -> bool:
    return f"{key}.".startswith(f"{path}.") or f"{path}.".startswith(f"{key}.")


def _check(rule: str, *keys: str) -> Callable[[Find], Find]:
    """Register the decorated function as the check of a rule."""

    def register(find: Find) -> Find:
        CHECKS.append(Check(rule, keys, find))
        return find

    return register


@_check("the axes of a prefill replica fit together", "prefill.parallel")
def _prefill_axes(config: DeployConfig) -> Iterable[Problem]:
    return axis_problems(config.prefill.parallel, "prefill.parallel")


@_check("the axes of a decode replica fit together", "decode.parallel")
def _decode_axes(config: DeployConfig) -> Iterable[Problem]:
    return axis_problems(config.decode.parallel, "decode.parallel")


@_check("prefill.passing applies only in ring mode", "prefill.mode", "prefill.passing", "prefill.parallel.cp")
def _passing(config: DeployConfig) -> Iterator[Problem]:
    prefill = config.prefill
    if prefill.ownership is KvOwnership.REPLICATED and prefill.passing is not PassingSetting.AUTO:
        why = f"prefill.mode = {prefill.mode}; allowed: auto, since only ring mode passes Q or KV"
        if prefill.mode is CpMode.RING:
            why = "prefill.parallel.cp = 1; allowed: auto, since a ring needs two ranks"
        yield Problem("prefill.passing", f"got {prefill.passing} with {why}")


@_check("in ring mode every rank sends its own pages", "prefill.mode", "prefill.parallel.cp", "transfer.mode")
def _ring_transfer(config: DeployConfig) -> Iterator[Problem]:
    prefill, mode = config.prefill, config.transfer.mode
    if prefill.ownership is KvOwnership.SHARDED and mode is not TransferMode.ALL_RANKS:
        why = f"with prefill.mode = ring and cp = {prefill.parallel.cp}"
        yield Problem("transfer.mode", f"got {mode} {why}; allowed: all_ranks, since rank 0 holds only its own pages")


@_check("only several CP ranks store projections together", "prefill.shard_linear", "prefill.parallel.cp")
def _shard_linear(config: DeployConfig) -> Iterator[Problem]:
    way = config.prefill.shard_linear
    if way is not ShardLinear.NONE and config.prefill.parallel.cp == 1:
        why = "prefill.parallel.cp = 1; allowed: none, since no other rank could store them"
        yield Problem("prefill.shard_linear", f"got {way} with {why}")


@_check("only mooncake supports RDMA", "transfer.backend", "transfer.protocol")
def _protocol(config: DeployConfig) -> Iterator[Problem]:
    backend, protocol = config.transfer.backend, config.transfer.protocol
    if backend is not TransferBackendName.MOONCAKE and protocol is not TransferProtocol.TCP:
        allowed = "tcp; rdma needs backend mooncake"
        yield Problem("transfer.protocol", f"got {protocol} with transfer.backend = {backend}; allowed: {allowed}")


@_check("the attention backend runs on the device", "resources.attention", "resources.device")
def _attention(config: DeployConfig) -> Iterator[Problem]:
    attention, device = config.resources.attention, config.resources.device
    suitable = sorted(each for each in AttentionSetting if ATTENTION_DEVICES.get(each, device) is device)
    if attention not in suitable:
        allowed = ", ".join(suitable)
        yield Problem("resources.attention", f"got {attention} with resources.device = {device}; allowed: {allowed}")


@_check("pages have a size that the attention backend reads", "resources.attention", "kv.page_size")
def _flash_attn_pages(config: DeployConfig) -> Iterator[Problem]:
    page_size = config.kv.page_size
    if config.resources.attention is AttentionSetting.FLASH_ATTN and page_size % _FLASH_ATTN_PAGE:
        allowed = f"multiples of {_FLASH_ATTN_PAGE}"
        yield Problem("kv.page_size", f"got {page_size} with resources.attention = flash_attn; allowed: {allowed}")


@_check("resources.silence_s is longer than a lease", "resources.silence_s")
def _silence(config: DeployConfig) -> Iterator[Problem]:
    if (silence_s := config.resources.silence_s) <= LEASE_S:
        allowed = f"more than {LEASE_S}, the silence after which a replica gets no requests"
        yield Problem("resources.silence_s", f"got {silence_s}; allowed: {allowed}")


@_check("the router's wait is shorter than the request timeout", "router.max_wait_s", "router.request_timeout_s")
def _router_wait(config: DeployConfig) -> Iterator[Problem]:
    wait_s, timeout_s = config.router.max_wait_s, config.router.request_timeout_s
    if wait_s >= timeout_s:
        yield Problem("router.max_wait_s", f"got {wait_s}; allowed: less than router.request_timeout_s = {timeout_s}")


@_check(
    "storage needs host memory and the prefix cache",
    "hicache.host_gib",
    "hicache.storage.backend",
    "kv.prefix_cache",
)
def _storage(config: DeployConfig) -> Iterator[Problem]:
    hicache, backend = config.hicache, config.hicache.storage.backend
    if backend is not StorageBackendName.NONE and not (hicache.has_host and config.kv.prefix_cache):
        given = f"hicache.host_gib = {hicache.host_gib} and kv.prefix_cache = {str(config.kv.prefix_cache).lower()}"
        allowed = "none; other backends need hicache.host_gib above 0 and kv.prefix_cache = true"
        yield Problem("hicache.storage.backend", f"got {backend} with {given}; allowed: {allowed}")


@_check("a write policy needs host memory", "hicache.host_gib", "hicache.write")
def _write(config: DeployConfig) -> Iterator[Problem]:
    hicache = config.hicache
    if not hicache.has_host and hicache.write is not WritePolicy.WRITE_THROUGH:
        given = f"{hicache.write} with hicache.host_gib = {hicache.host_gib:g}"
        yield Problem(
            "hicache.write", f"got {given}; allowed: write_through; other policies need hicache.host_gib above 0"
        )


@_check("the storage folder is an absolute path", "hicache.storage.folder")
def _storage_folder(config: DeployConfig) -> Iterator[Problem]:
    folder = config.hicache.storage.folder
    if folder is not None and folder != "~" and not folder.startswith(("/", "~/")):
        allowed = "a path that begins with / or ~/"
        yield Problem("hicache.storage.folder", f"got {folder}; allowed: {allowed}")


@_check("the Mooncake Store master has a valid address", "hicache.storage.master", "hicache.storage.backend")
def _master(config: DeployConfig) -> Iterator[Problem]:
    storage = config.hicache.storage
    match = _ADDRESS.fullmatch(storage.master)
    is_valid = match is not None and 1 <= int(match["port"]) <= _LAST_PORT
    if storage.backend is StorageBackendName.MOONCAKE_STORE and not is_valid:
        allowed = f"host:port with a port from 1 to {_LAST_PORT}, such as 127.0.0.1:50051"
        yield Problem("hicache.storage.master", f"got {storage.master}; allowed: {allowed}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """Properties of a model that limit how its ranks divide and compute it."""

    num_heads: int
    num_kv_heads: int
    num_layers: int
    num_experts: int | None
    """Number of experts per layer; None for dense models."""
    has_windows: bool = False
    """True if a layer uses sliding-window attention."""


def layout_problems(parallel: AnyParallel, path: str, model: ModelLimits) -> list[Problem]:
    """Return the problems of axes that are legal but do not fit this model; ``path`` is their section of the file."""
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
    """Reject ring mode for models with sliding windows, which need adjacent pages on one rank."""
    if prefill.ownership is KvOwnership.REPLICATED or not model.has_windows:
        return []
    given = f"{prefill.mode} with cp = {prefill.parallel.cp}"
    return [Problem("prefill.mode", f"got {given}; allowed: gather, since the model has sliding windows")]


def _expert_problems(parallel: AnyParallel, path: str, num_experts: int | None) -> list[Problem]:
    if num_experts is None:
        return [
            Problem(f"{path}.{axis}", f"got {size}; allowed: 1, since the model has no experts")
            for axis, size in (("ep", parallel.ep), ("moe_dp", parallel.moe_dp))
            if size > 1
        ]
    if num_experts % parallel.ep:
        return [Problem(f"{path}.ep", f"got {parallel.ep}; allowed: a divisor of the model's {num_experts} experts")]
    return []
