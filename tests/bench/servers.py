"""The two servers that are compared, each a session of processes of its own, ended whatever happens."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

START_S = 900.0
"""vLLM compiles when it starts."""


@dataclass
class Server:
    """One of the two."""

    name: str
    url: str
    process: subprocess.Popen[bytes]
    model: str
    ttft_s: dict[int, list[float]] = field(default_factory=dict)
    """By prompt length."""


@contextmanager
def run_baton(deploy: str, model: Path, scratch: Path, name: str = "baton", port: int = 8761) -> Iterator[Server]:
    """``baton up``."""
    command = [str(Path(sys.executable).with_name("baton")), "up", deploy, "--model", str(model)]
    for change in (f"name=compared-{port}", f"router.port={port}", "kv.prefix_cache=false"):
        command += ["--set", change]
    with run(name, command, {}, port, scratch, model.name) as server:
        yield server


@contextmanager
def run_vllm(python: Path, model: Path, scratch: Path, max_len: int) -> Iterator[Server]:
    """``vllm serve`` on all cores, with the OpenMP library that its manual asks for.

    The wheel has no metadata of the name that its command looks for.
    """
    metadata = scratch / "vllm-0.32.0+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    environ = {
        "PYTHONPATH": str(scratch),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        "VLLM_NO_USAGE_STATS": "1",
        "LD_PRELOAD": str(python.parent.parent / "lib" / "libiomp5.so"),
    }
    command = [str(python.with_name("vllm")), "serve", str(model), "--dtype", "bfloat16", "--port", "8762"]
    command += ["--no-enable-prefix-caching", "--max-model-len", str(max_len), "--host", "127.0.0.1"]
    with run("vllm", command, environ, 8762, scratch, str(model)) as server:
        yield server


@contextmanager
def run(
    name: str, command: Sequence[str], environ: dict[str, str], port: int, scratch: Path, model: str
) -> Iterator[Server]:
    """Start a server, wait until it answers, and end all of its processes."""
    log = scratch / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=os.environ | environ, stdout=output, stderr=output, start_new_session=True
        )
    try:
        server = Server(name, f"http://127.0.0.1:{port}", process, model)
        wait_until_ready(server, log)
        yield server
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def wait_until_ready(server: Server, log: Path) -> None:
    """Return once it lists its model and answers a request."""
    deadline_s = time.monotonic() + START_S
    while True:
        try:
            body = {"model": server.model, "prompt": [300] * 8, "max_tokens": 1}
            if httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        if server.process.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"{server.name} did not start:\n{log.read_text()[-3000:]}")
        time.sleep(1)


def idle_share(server: Server, seconds: float = 3.0) -> float:
    """Processor time that a server's session takes while it has nothing to do, in cores."""
    time.sleep(2)
    before_s = session_cpu_s(server.process.pid)
    time.sleep(seconds)
    return (session_cpu_s(server.process.pid) - before_s) / seconds


def session_cpu_s(session: int) -> float:
    """Processor time of all processes of a session so far."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
