"""Terminal output of `baton up`: checks of the model, progress, and the endpoint of the ready cluster."""

import contextlib
import json
import logging
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import httpx
from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table

from cluster.machine_memory import MachineMemory, machine_memory
from cluster.planner.memory import longest_problem, memory_lack, model_problems
from cluster.planner.model import ModelFacts, facts_of
from cluster.processes import INSTALL_FOLDER
from cluster.spec.config import DeployConfig, Device, TransferBackendName
from cluster.spec.errors import BatonError, ConfigError, UserError
from cluster.spec.memory import GIB
from cluster.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

_POLL_S = 0.05


def wait_ready(url: str) -> None:
    """Wait until the router has a ready replica of each role, however often replicas fail meanwhile."""
    with httpx.Client(base_url=url, timeout=5.0, trust_env=False) as http:
        while True:
            with contextlib.suppress(httpx.TransportError):  # the router may be shutting down again
                if http.get("/ready").is_success:
                    return
            time.sleep(_POLL_S)


def ready_text(url: str, config: DeployConfig, logs: str) -> str:
    from workers.models.recall import DEMO_ANSWER, DEMO_PROMPT
    from workers.models.recall_weights import BUILT_IN

    model = config.model.name
    if config.model.path in BUILT_IN:
        path, body = "completions", {"model": model, "prompt": DEMO_PROMPT, "max_tokens": 16}
        answer = f"\nThe answer is {DEMO_ANSWER!r}.\n"
    else:
        message = {"role": "user", "content": "What is a relay race? Answer in one sentence."}
        path, body = "chat/completions", {"model": model, "messages": [message], "max_tokens": 64}
        answer = ""
    target, header, data = map(shlex.quote, (f"{url}/v1/{path}", "Content-Type: application/json", json.dumps(body)))
    request = f"curl -s {target} -H {header} -d {data}"
    return (
        f"\nready   {url}/v1   model {model}\nlogs    {logs}\n\n{request}\n{answer}\n"
        f"Ctrl-C, or `baton down --cluster {config.name}`, stops the cluster."
    )


def check_model(
    config: DeployConfig, folder: Path, say: Callable[[str], None], memory: MachineMemory | None = None
) -> None:
    """Check that the cluster can run. Pass a warning to ``say`` if too little memory is free now, or if the KV pool of
    workers on CPUs is too small for the model's longest requests.

    Raises:
        UserError: the engine cannot run the model, its layout or KV dtype, or the machine has too little memory.
    """
    model = facts_of(config, folder)
    if problems := model_problems(config, model, with_gpu=False):
        raise ConfigError(problems)
    resources, one_machine = config.resources, config.transfer.backend is TransferBackendName.SHARED_MEMORY
    if resources.device is Device.CPU and (too_long := longest_problem(config, model)):
        say(f"context: {too_long}")
    if one_machine and resources.device is Device.CPU and resources.machine_memory_gib is None:
        _check_machine(config, model, say, memory or machine_memory())


def check_files(folder: Path) -> None:
    """Check a model's tokenizer, and its weights in a process of their own, because this one does not load torch.

    Raises:
        UserError: a file is missing or damaged, or the weights are not those of config.json.
    """
    Tokenizer(folder)
    command = [sys.executable, "-m", "workers.engine.weights", str(folder)]
    done = subprocess.run(command, cwd=INSTALL_FOLDER, capture_output=True, text=True, check=False)
    if done.returncode == 2:
        raise UserError(done.stdout.strip())
    if done.returncode:
        raise BatonError(f"the check of the weights in {folder} failed: {done.stderr.strip()}")


def _check_machine(config: DeployConfig, model: ModelFacts, say: Callable[[str], None], memory: MachineMemory) -> None:
    if not memory.total:
        return
    total_gib, available_gib = memory.total / GIB, memory.available / GIB
    if lack := memory_lack(config, model, total_gib):
        raise UserError(f"{memory.owner} has {total_gib:.4g} GiB of memory; needed: {lack}")
    if lack := memory_lack(config, model, available_gib):
        say(f"memory: {available_gib:.4g} GiB is available on {memory.owner} now; needed: {lack}")


class StartProgress:
    """Progress display, shown until its context ends. Thread-safe."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._began_s = time.monotonic()
        self._stages: dict[str, tuple[str, float]] = {}
        self._lock = threading.Lock()
        self._live = Live(console=self._console, get_renderable=self._table, refresh_per_second=8, transient=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def finish(self) -> None:
        """Stop the live display. Later stages are printed as plain lines. Safe to call twice."""
        self._live.stop()

    def stage(self, member: str, stage: str) -> None:
        now_s = time.monotonic() - self._began_s
        with self._lock:
            self._stages[member] = (stage, now_s)
        if not self._live.is_started:
            self.line(f"{now_s:5.1f} s  {member}: {stage}")

    def line(self, text: str) -> None:
        _log.info("%s", text.strip())
        with contextlib.suppress(OSError):  # the terminal may be gone, but the cluster must still shut down
            self._console.print(text, markup=False)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        with self._lock:
            stages = dict(self._stages)
        for member, (stage, at_s) in stages.items():
            symbol = "[green]✓[/]" if stage == "ready" else Spinner("dots")
            table.add_row(symbol, member, stage, f"{at_s:.1f} s")
        return table
