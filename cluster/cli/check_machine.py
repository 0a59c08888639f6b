"""Machine checks of `baton doctor`: memory, cores, ports, limits."""

import os
import resource
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path

from cluster.cli.finding import Finding, Status
from cluster.machine_memory import MachineMemory, machine_memory
from workers.native.compile import CannotCompileError, find_compiler

GIB = 1024**3
ENDPOINT = ("127.0.0.1", 8000)


def check_port(address: tuple[str, int] = ENDPOINT) -> Finding:
    """Check that the endpoint's default port is free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            mend = "stop what listens there, or set router.port in the deploy file"
            return Finding("port", Status.WARN, f"{address[0]}:{address[1]}: {error.strerror}", mend)
    return Finding("port", Status.OK, f"{address[0]}:{address[1]} is free")


def check_attention() -> Finding:
    """Check whether the CPU supports native bf16 attention; without it everything works, at half the speed."""
    try:
        path, kind = find_compiler()
        return Finding("attention", Status.OK, f"native for bf16 with {kind.name}, compiled by {path}")
    except CannotCompileError as error:
        status = Status.WARN if error.mend else Status.OK
        mend = error.mend and f"for twice the speed in bf16: {error.mend}"
        return Finding("attention", status, f"plain torch: {error}", mend)


def check_cores(num_cores: int | None = None) -> Finding:
    """Check how many cores this process may use."""
    num_cores = num_cores or len(os.sched_getaffinity(0))
    if num_cores < 2:
        return Finding("cores", Status.WARN, str(num_cores), "the default topology computes on two cores at once")
    return Finding("cores", Status.OK, str(num_cores))


def check_memory(memory: MachineMemory | None = None) -> Finding:
    """Check the memory available without swapping."""
    available_gib = (memory or machine_memory()).available / GIB
    found = f"{available_gib:.1f} GiB available"
    if available_gib < 4:
        return Finding("memory", Status.WARN, found, "free at least 4 GiB, or lower kv.memory_gib in the deploy file")
    return Finding("memory", Status.OK, found)


def check_model_cache(environ: Mapping[str, str] = os.environ, home: Path | None = None) -> Finding:
    """Check where models from the Hugging Face hub are cached."""
    root = Path(environ.get("HF_HOME") or (home or Path.home()) / ".cache" / "huggingface")
    hub = Path(environ.get("HF_HUB_CACHE") or root / "hub")
    existing = next(path for path in (hub, *hub.absolute().parents) if path.exists())
    if not os.access(existing, os.W_OK):
        return Finding("model cache", Status.WARN, f"{hub} cannot be written", "set HF_HOME to a folder that can")
    num_models = len(list(hub.glob("models--*")))
    free_gib = shutil.disk_usage(existing).free / GIB
    return Finding("model cache", Status.OK, f"{hub}: {num_models} models, {free_gib:.0f} GiB free")


def check_open_files(limit: int | None = None) -> Finding:
    """Check the limit on open files; every connection takes one."""
    if limit is None:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < 4096:
        return Finding("open files", Status.WARN, f"at most {limit}", "run `ulimit -n 65536` first")
    return Finding("open files", Status.OK, "no limit" if limit == resource.RLIM_INFINITY else f"at most {limit}")
