"""The documents as data: README.md and the pages of docs/, their fenced blocks and shell commands."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def pages() -> dict[str, str]:
    """Return the text of every document, by path."""
    names = ["README.md", "CONTRIBUTING.md", *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
    return {name: text(name) for name in sorted(names)}


def text(page: str = "README.md") -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def prose(page: str) -> str:
    """Return a page on one line, without its fenced blocks."""
    return " ".join(_FENCE.sub("", text(page)).split())


def blocks(language: str, page: str = "README.md") -> list[str]:
    """Return the fenced blocks of one language, in order."""
    return [found[2] for found in _FENCE.finditer(text(page)) if found[1] == language]


def commands() -> list[str]:
    """Return README's shell commands. Lines within quotes or braces belong to the command that they continue."""
    found: list[str] = []
    for block in blocks("bash"):
        pending = ""
        for line in block.splitlines(keepends=True):
            pending += line
            if pending.count("'") % 2 == 0:
                found.append(pending.strip())
                pending = ""
        assert not pending, f"a quote is not closed in {block!r}"
    return found


def command(start: str) -> str:
    """Return the only command that starts with a text."""
    (found,) = (line for line in commands() if line.startswith(start))
    return found


def installed(command: str) -> str:
    """Return a command with the programs of this environment."""
    return command.replace(".venv/bin/", f"{shlex.quote(str(Path(sys.executable).parent))}/")


def run(command: str, env: Mapping[str, str] | None = None) -> str:
    """Return what a command prints. Its exit code must be 0."""
    done = subprocess.run(
        ["bash", "-c", installed(command)],
        capture_output=True,
        text=True,
        timeout=180,
        cwd=ROOT,
        env=os.environ | (env or {}),
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout
