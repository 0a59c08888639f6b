"""README says what is there: its files, topologies, links, and that each command is executed somewhere."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from cluster.cli.main import app
from cluster.spec.config import DeployConfig, ParallelConfig
from tests import readme
from workers.models.recall import DEMO_ANSWER, DEMO_PROMPT

EXECUTED_IN = {
    "sudo apt-get install": ".ci/run",
    "make test": ".ci/run",
    "make serve": "tests/integration/clusters/test_readme.py",
    "curl": "tests/integration/clusters/test_readme.py",
    ".venv/bin/baton": "tests/integration/clusters/test_readme.py",
    "ray job": "tests/integration/clusters/test_readme.py",
}
"""What executes a command, by how the command begins."""


@pytest.mark.parametrize("command", readme.commands())
def test_every_command_is_executed(command: str) -> None:
    (file,) = {file for start, file in EXECUTED_IN.items() if command.startswith(start)}
    source = (readme.ROOT / file).read_text(encoding="utf-8")
    if file == ".ci/run":
        assert command.removeprefix("sudo ") in source
    else:
        starts = re.findall(r'readme\.command\("([^"]+)"\)', source)
        assert any(command.startswith(start) for start in starts), f"{file} executes only {starts}"


def test_commands_in_the_text_exist() -> None:
    prose = " ".join(re.sub(r"^```.*?^```$", "", readme.text(), flags=re.MULTILINE | re.DOTALL).split())
    mentioned = set(re.findall(r"`(?:baton )?((?<=baton )[^`]+|bench [^`]+)`", prose))
    assert {"doctor", "bench cp", "simulate", "restart --rolling"} <= mentioned
    for words in mentioned:
        options = {name for option in _command(words.split()).params for name in option.opts}
        assert set(re.findall(r"--[\w-]+", words)) <= options, words


def _command(words: list[str]) -> Any:
    """The command that some words begin with."""
    command: Any = get_command(app)
    for name in words:
        if not hasattr(command, "commands"):
            break
        assert name in command.commands, f"baton has no {' '.join(words)}"
        command = command.commands[name]
    return command


def test_every_topology_is_listed_as_it_is() -> None:
    rows = dict(re.findall(r"^\| `(deploy/[\w-]+\.yaml)` \| (.*) \|$", readme.text(), re.MULTILINE))
    files = {f"deploy/{path.name}" for path in (readme.ROOT / "deploy").glob("local-*.yaml")}
    assert set(rows) == files
    for file, row in rows.items():
        assert row == _row(DeployConfig(**yaml.safe_load((readme.ROOT / file).read_text()))), file


def test_links_and_files_exist() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)\)", readme.text())
    files = re.findall(r"`((?:cluster|router|workers|transfer|deploy|tests|docs)/[\w./-]+)`", readme.text())
    assert links
    assert files
    assert [name for name in links + files if not Path(readme.ROOT, name).exists()] == []


def test_the_demo_is_the_models_own() -> None:
    quoted = DEMO_PROMPT.replace("\n", "\\n")
    assert quoted in readme.command("curl")
    assert quoted in readme.command(".venv/bin/baton chat")
    assert all(quoted in block for block in readme.blocks("python"))
    assert f"`{DEMO_ANSWER}`" in readme.text()


def _row(config: DeployConfig) -> str:
    cp = config.prefill.parallel.cp
    if config.transfer.mode == "rank0":
        sends = ", CP rank 0 sends everything"
    else:
        sends = ", every CP rank sends its pages" if cp > 1 else ""
    ring = ", ring" if config.prefill.mode == "ring" else ""
    prefill = f"{_replicas(config.prefill.replicas)}, cp={cp}{_sizes(config.prefill.parallel)}{ring}"
    decode = f"{_replicas(config.decode.replicas)}{_sizes(config.decode.parallel)}"
    backend = {"shared_memory": "shared memory", "mooncake": "Mooncake over TCP"}[config.transfer.backend]
    return f"{prefill} | {decode} | {backend}{sends}"


def _sizes(parallel: ParallelConfig) -> str:
    sizes = {axis: getattr(parallel, axis) for axis in ("tp", "pp", "dp", "ep", "moe_dp")}
    return "".join(f", {axis}={size}" for axis, size in sizes.items() if size > 1)


def _replicas(count: int) -> str:
    return f"{count} replica{'s' if count > 1 else ''}"
