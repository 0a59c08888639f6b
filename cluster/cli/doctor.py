"""`baton doctor`: checks of the installation and the machine. They import no heavy packages."""

import ctypes
import dataclasses
import importlib.metadata
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from cluster.compilation import CannotCompileError
from cluster.machine_memory import MachineMemory, machine_memory
from cluster.processes import INSTALL_FOLDER
from cluster.spec.env import CACHE_DIR
from cluster.spec.errors import UserError
from cluster.spec.memory import GIB
from workers.native.compile import find_compiler

MOONCAKE_PACKAGES = (
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine",
)
"""Builds without CUDA, for CUDA 13 and for CUDA 12."""
MOONCAKE_LIBRARIES = {
    "libibverbs.so.1": "libibverbs1",
    "libmlx5.so.1": "ibverbs-providers",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
}
"""Shared libraries that Mooncake's wheels link to, and the Debian packages that contain them."""
ENDPOINT = ("127.0.0.1", 8000)
_MEASURE_S = 120
"""Maximum time to compile and time the attention backends."""
_TRIED_BYTES = 64 << 10
"""Bytes written to find out whether the cache folder can be written."""


class Status(StrEnum):
    OK = "ok"
    WARN = "warn"
    """A feature is slower, or unavailable in some topologies."""
    FAIL = "fail"
    """The default cluster cannot start."""


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    status: Status
    found: str
    fix: str = ""
    """Suggested fix; empty if there is nothing to fix."""


def check_python(version: tuple[int, int, int] = sys.version_info[:3], prefix: str = sys.prefix) -> Finding:
    found = f"{'.'.join(map(str, version))} in {prefix}"
    if version < (3, 11):
        return Finding("python", Status.FAIL, found, "install Python 3.11 or newer and run `make venv`")
    if prefix == sys.base_prefix:
        fix = "run `make venv` and use .venv/bin/baton"
        return Finding("python", Status.WARN, f"{found}, no virtual environment", fix)
    return Finding("python", Status.OK, found)


def check_packages(requirements: Sequence[str] | None = None) -> Finding:
    """Check that all of Baton's dependencies except extras are installed."""
    if requirements is None:
        requirements = importlib.metadata.requires("baton-serve") or ()
    names = [re.split(r"[^\w.-]", text, maxsplit=1)[0] for text in requirements if "extra ==" not in text]
    missing = [name for name in names if installed_version(name) is None]
    if missing:
        return Finding("packages", Status.FAIL, f"missing: {', '.join(missing)}", "run `make venv`")
    return Finding("packages", Status.OK, f"all {len(names)} installed")


def check_ray(environ: Mapping[str, str] = os.environ, home: Path | None = None) -> Finding:
    version = installed_version("ray")
    if version is None:
        return Finding("ray", Status.FAIL, "not installed", "run `make venv`")
    # Unlike the methods of Path, these functions do not fail without a home folder, or if it may not be entered.
    default_path = (home or Path(os.path.expanduser("~"))) / ".ray" / "auth_token"  # noqa: PTH111
    token_path = Path(environ.get("RAY_AUTH_TOKEN_PATH", default_path))
    has_token = "RAY_AUTH_TOKEN" in environ or os.path.isfile(token_path)  # noqa: PTH113
    mode = environ.get("RAY_AUTH_MODE", "").lower()
    found = f"{version}, RAY_AUTH_MODE {mode or 'not set'}, {'a' if has_token else 'no'} token"
    if mode not in ("", "token", "disabled"):
        return Finding("ray", Status.FAIL, found, "set RAY_AUTH_MODE to token or disabled, or unset it")
    if mode == "token" and not has_token:
        fix = f"run `ray get-auth-token --generate`, or copy the cluster's token to {token_path}"
        return Finding("ray", Status.WARN, found, f"{fix}; a local cluster creates its own")
    return Finding("ray", Status.OK, found)


def check_torch(
    version: str | None = None, num_gpus: int | None = None, missing: Callable[[], Sequence[str]] | None = None
) -> Finding:
    """Check that PyTorch is installed and, if there are GPUs, built for CUDA and able to compile Triton's launchers.

    Does not load CUDA.
    """
    version = version or installed_version("torch")
    num_gpus = len(list(Path("/dev").glob("nvidia[0-9]*"))) if num_gpus is None else num_gpus
    if version is None:
        return Finding("torch", Status.FAIL, "not installed", "run `make venv`")
    cpu_only = version.endswith("+cpu")
    found = f"{version} ({'CPU' if cpu_only else 'CUDA'} build), {num_gpus} NVIDIA devices"
    if cpu_only and num_gpus:
        release = version.removesuffix("+cpu")
        return Finding("torch", Status.WARN, found, f"to use the GPU: `make clean`, then `make venv TORCH={release}`")
    packages = (missing or missing_triton_packages)() if num_gpus else ()
    if packages:
        fix = f"to use the GPU: apt-get install -y {' '.join(packages)}"
        return Finding("torch", Status.WARN, f"{found}; missing Debian packages: {', '.join(packages)}", fix)
    return Finding("torch", Status.OK, found)


def check_mooncake(
    version: Callable[[str], str | None] | None = None, missing: Callable[[], Sequence[str]] | None = None
) -> Finding:
    installed = next(filter(None, map(version or installed_version, MOONCAKE_PACKAGES)), None)
    if installed is None:
        fix = "for `transfer.backend: mooncake`: .venv/bin/pip install -c constraints.txt -e '.[mooncake]'"
        return Finding("mooncake", Status.WARN, "not installed", fix)
    packages = (missing or missing_mooncake_packages)()
    if packages:
        fix = f"for `transfer.backend: mooncake`: apt-get install -y {' '.join(packages)}"
        return Finding("mooncake", Status.WARN, f"{installed}; missing Debian packages: {', '.join(packages)}", fix)
    return Finding("mooncake", Status.OK, installed)


def check_port(address: tuple[str, int] = ENDPOINT) -> Finding:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            fix = "stop the process that listens there, or set router.port in the deploy file"
            return Finding("port", Status.WARN, f"{address[0]}:{address[1]}: {error.strerror}", fix)
    return Finding("port", Status.OK, f"{address[0]}:{address[1]} is free")


def check_cache(folder: Path | None = None) -> Finding:
    """Check that the folder for logs, built checkpoints and compiled kernels can be written, without creating it."""
    try:
        folder = folder or CACHE_DIR.get()
    except UserError as error:
        return Finding("cache", Status.FAIL, str(error), "set BATON_CACHE_DIR")
    nearest = next(parent for parent in (folder, *folder.parents) if os.path.exists(parent))  # noqa: PTH110
    try:
        with tempfile.TemporaryFile(dir=nearest) as file:
            file.write(bytes(_TRIED_BYTES))
    except OSError as error:
        found = f"{nearest} cannot be written: {error.strerror}"
        return Finding("cache", Status.FAIL, found, "set BATON_CACHE_DIR to another folder")
    free_gib = shutil.disk_usage(nearest).free / GIB
    found = f"{folder}, {free_gib:.1f} GiB free"
    if free_gib < 1:
        return Finding("cache", Status.WARN, found, "free at least 1 GiB, or set BATON_CACHE_DIR to another folder")
    return Finding("cache", Status.OK, found)


def check_attention(command: Sequence[str] = (sys.executable, "-m", "workers.bench.attention")) -> Finding:
    """Check whether native kernels can be compiled for this CPU, and time them and torch, as workers do.

    Args:
        command: prints the faster backends and all times.
    """
    try:
        find_compiler()
    except CannotCompileError as error:
        status = Status.WARN if error.fix else Status.OK
        fix = error.fix and f"to double the speed: {error.fix}"
        return Finding("attention", status, f"plain torch: {error}", fix)
    try:
        found = subprocess.run(
            command, cwd=INSTALL_FOLDER, capture_output=True, text=True, timeout=_MEASURE_S, check=True
        ).stdout.strip()
        status = Status.WARN if "native is unavailable" in found else Status.OK
        return Finding("attention", status, found)
    except subprocess.SubprocessError as error:
        last_words = str(getattr(error, "stderr", None) or error).strip().splitlines()[-1]
        return Finding("attention", Status.WARN, f"cannot be measured: {last_words}", "run `make venv`")


def check_memory(memory: MachineMemory | None = None) -> Finding:
    available_gib = (memory or machine_memory()).available / GIB
    found = f"{available_gib:.1f} GiB available"
    if available_gib < 4:
        return Finding("memory", Status.WARN, found, "free at least 4 GiB, or lower kv.memory_gib in the deploy file")
    return Finding("memory", Status.OK, found)


def missing_triton_packages() -> list[str]:
    """Return the missing Debian packages with which Triton compiles the code that launches its kernels."""
    compilers = (os.environ.get("CC"), shutil.which("gcc"), shutil.which("clang"))
    has_headers = Path(sysconfig.get_paths()["include"], "Python.h").exists()
    return ["gcc"] * (not any(compilers)) + ["python3-dev"] * (not has_headers)


def missing_mooncake_packages() -> list[str]:
    """Return the missing Debian packages that the mooncake wheel needs."""
    return [package for library, package in MOONCAKE_LIBRARIES.items() if not _loads(library)]


def installed_version(package: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


CHECKS: tuple[Callable[[], Finding], ...] = (
    check_python,
    check_packages,
    check_ray,
    check_torch,
    check_mooncake,
    check_port,
    check_memory,
    check_cache,
    check_attention,
)

_STYLES = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red"}


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Check this machine and suggest a fix for each problem. The exit code is 1 if the default cluster cannot start."""
    findings = [check() for check in CHECKS]
    failed = any(finding.status is Status.FAIL for finding in findings)
    if as_json:
        print(json.dumps({"ok": not failed, "findings": [dataclasses.asdict(finding) for finding in findings]}))
    else:
        _print(findings)
    if failed:
        raise typer.Exit(1)


def _print(findings: list[Finding]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for finding in findings:
        line = Text.assemble((f"{finding.status:<5}", _STYLES[finding.status]), f"{finding.name:<14}", finding.found)
        console.print(line)
        if finding.fix:
            console.print(Text(f"     {'':<14}-> {finding.fix}", style="dim"))
