"""README.md as data: its fenced blocks and the shell commands in them."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def text() -> str:
    """All of README.md."""
    return (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The fenced blocks of one language, in order."""
    return [found[2] for found in _FENCE.finditer(text()) if found[1] == language]


def commands() -> list[str]:
    """Every shell command; lines within quotes or braces belong to the command they continue."""
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
    """The one command that starts with a text."""
    (found,) = (line for line in commands() if line.startswith(start))
    return found
