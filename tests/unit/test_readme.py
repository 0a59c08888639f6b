"""The documents match the project: files, links, topologies and names. README's commands are executed in some test."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from cluster.cli.app import app
from cluster.spec.config import AnyParallel, DeployConfig
from tests import readme
from workers.models.recall import DEMO_ANSWER, DEMO_PROMPT

COMMANDS = "tests/integration/clusters/local_cpu/test_readme_commands.py"
EXECUTED_IN = {
    "sudo apt-get install": ".ci/run",
    "make serve": "tests/integration/clusters/local_cpu/conftest.py",
    "curl": COMMANDS,
    **dict.fromkeys([f".venv/bin/baton {name}" for name in ("bench", "chat", "doctor", "plan", "status")], COMMANDS),
    ".venv/bin/baton up": "tests/integration/clusters/test_readme.py",
    "ray job": "tests/integration/clusters/test_readme.py",
}
"""The test that executes a command, by the command's first words."""
CODE = ("cluster", "router", "workers", "transfer")
PAGES = sorted(readme.pages())
MAX_README_LINES = 130
MAX_ARCHITECTURE_LINES = 150
MAX_PARAGRAPH_WORDS = 120


@pytest.mark.parametrize("command", readme.commands())
def test_every_command_is_executed(command: str) -> None:
    (file,) = {file for start, file in EXECUTED_IN.items() if command.startswith(start)}
    source = (readme.ROOT / file).read_text(encoding="utf-8")
    if file == ".ci/run":
        assert command.removeprefix("sudo ") in source
    else:
        starts = re.findall(r'readme\.command\("([^"]+)"\)', source)
        assert any(command.startswith(start) for start in starts), f"{file} executes only {starts}"


@pytest.mark.parametrize("page", [page for page in PAGES if page != "README.md"])
def test_only_readme_has_blocks_that_are_executed(page: str) -> None:
    assert readme.blocks("bash", page) == [], "a block of another page is sh, and not executed"


def test_no_text_installs_another_project_of_this_name() -> None:
    """PyPI has an unrelated package called baton."""
    texts = [*readme.ROOT.rglob("*.md"), *(file for folder in CODE for file in (readme.ROOT / folder).rglob("*.py"))]
    wrong = re.compile(r"(pip3? install|uv add|pip3? wheel)[^\n`]*['\" ]baton\b(?!-serve)")
    found = [file for file in texts if ".venv" not in file.parts and wrong.search(file.read_text(encoding="utf-8"))]
    assert wrong.search("pip install 'baton[otel]'")
    assert found == []


def test_commands_in_the_text_exist() -> None:
    text = " ".join(readme.prose(page) for page in PAGES if not page.startswith("docs/benchmarks/"))
    mentioned = set(re.findall(r"`(?:baton )?((?<=baton )[^`]+|bench [^`]+)`", text))
    assert {"doctor", "bench cp", "simulate", "restart --rolling"} <= mentioned
    for words in mentioned:
        options = {name for option in _command(words.split()).params for name in option.opts}
        assert set(re.findall(r"--[\w-]+", words)) <= options, words


def _command(words: list[str]) -> Any:
    """Return the command that some words begin with."""
    command: Any = get_command(app)
    for name in words:
        if not hasattr(command, "commands"):
            break
        assert name in command.commands, f"baton has no {' '.join(words)}"
        command = command.commands[name]
    return command


def test_every_topology_is_listed_as_it_is() -> None:
    rows = dict(re.findall(r"^\| `(deploy/[\w-]+\.yaml)` \| (.*) \|$", readme.text("docs/topologies.md"), re.MULTILINE))
    files = {f"deploy/{path.name}" for path in (readme.ROOT / "deploy").glob("local-*.yaml")}
    assert set(rows) == files
    for file, row in rows.items():
        assert row == _row(DeployConfig(**yaml.safe_load((readme.ROOT / file).read_text()))), file


@pytest.mark.parametrize("page", PAGES)
def test_links_and_files_exist(page: str) -> None:
    text = readme.text(page)
    links = [link for link in re.findall(r"\]\((?!http)([^)]+)\)", text) if not link.startswith("#")]
    missing = [link for link in links if not (readme.ROOT / page).parent.joinpath(link.split("#")[0]).exists()]
    files = re.findall(r"`((?:cluster|router|workers|transfer|deploy|tests|docs)/[\w./-]+)`", text)
    assert missing + [name for name in files if not Path(readme.ROOT, name).exists()] == []
    anchors = [link.split("#") for link in links if "#" in link]
    assert [link for link, anchor in anchors if anchor not in _anchors((readme.ROOT / page).parent / link)] == []


def test_readme_links_every_guide() -> None:
    guides = {page for page in PAGES if re.fullmatch(r"docs/[\w-]+\.md", page)}
    assert set(re.findall(r"\]\((docs/[\w-]+\.md)\)", readme.text())) == guides


def test_names_of_the_journey_are_in_the_code() -> None:
    defined: dict[str, set[str]] = {}
    for folder in CODE:
        for path in (readme.ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    defined.setdefault(node.name, set()).update(_members(node))
    names = set(re.findall(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)?)`", readme.text("docs/journey.md")))
    names = {
        name for name in names if not name.startswith("context.") and not name.partition(".")[0].endswith("_backend")
    }
    assert len(names) > 60
    owners = {name: name.partition(".")[::2] for name in names - {"stream", "true", "none"}}
    unknown = {name for name, (owner, _) in owners.items() if owner not in defined}
    assert unknown == {"outgoing", "received_pages"}
    assert [name for name, (owner, member) in owners.items() if member and member not in defined[owner]] == []


def _members(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Return the names of a class's own methods."""
    return {item.name for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_pages_are_short() -> None:
    assert len(readme.text().splitlines()) <= MAX_README_LINES
    for page in PAGES:
        if page.startswith("docs/architecture/"):
            assert len(readme.text(page).splitlines()) <= MAX_ARCHITECTURE_LINES, page
            text = re.sub(r"^```.*?^```$", "", readme.text(page), flags=re.MULTILINE | re.DOTALL)
            paragraphs = [part for part in re.split(r"\n\n|\n(?=- |\d+\. )", text) if not part.lstrip().startswith("|")]
            assert [part for part in paragraphs if len(part.split()) > MAX_PARAGRAPH_WORDS] == [], page


def test_the_demo_is_the_models_own() -> None:
    quoted = DEMO_PROMPT.replace("\n", "\\n")
    assert quoted in readme.command("curl")
    assert quoted in readme.command(".venv/bin/baton chat")
    assert all(quoted in block for block in readme.blocks("python"))
    assert f"`{DEMO_ANSWER}`" in readme.text()


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


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


def _sizes(parallel: AnyParallel) -> str:
    sizes = {axis: getattr(parallel, axis) for axis in ("tp", "pp", "dp", "ep", "moe_dp")}
    return "".join(f", {axis}={size}" for axis, size in sizes.items() if size > 1)


def _replicas(count: int) -> str:
    return f"{count} replica{'s' if count > 1 else ''}"
