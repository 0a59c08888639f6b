"""Tables of every key of a deploy file and every environment variable.

Run as ``python -m tests.configuration_page > docs/configuration.md``.
"""

from collections import defaultdict
from collections.abc import Iterator
from enum import StrEnum

from cluster.spec.config import DeployConfig
from cluster.spec.config_node import Node
from cluster.spec.env import ALL
from cluster.spec.loader import Keys, allowed

_HEAD = """\
# Configuration

A deploy file is YAML. An omitted key takes its default, and a key not listed here is refused. A value given with
`--set SECTION.KEY=VALUE` overrides the file. `baton plan FILE` checks a file and shows what it would start; with
`deploy/schema.json`, editors offer completion and validation.

This page is the output of `python -m tests.configuration_page`.
"""
_QUOTING = ", in quotes if it looks like a number"


def reference_text() -> str:
    """Return the text of ``docs/configuration.md``."""
    paths: defaultdict[type[Node], list[Keys]] = defaultdict(list)
    for path, kind in _sections(DeployConfig, ()):
        paths[kind].append(path)
    return "\n".join([_HEAD, *(_section(kind, where) for kind, where in paths.items()), _environment()])


def _sections(kind: type[Node], path: Keys) -> Iterator[tuple[Keys, type[Node]]]:
    """Yield a node and its descendants, with their paths."""
    yield path, kind
    for name, field in kind.model_fields.items():
        if isinstance(field.default, Node):
            yield from _sections(type(field.default), (*path, name))


def _section(kind: type[Node], paths: list[Keys]) -> str:
    names = ", ".join(f"`{'.'.join(path)}`" for path in paths)
    title = f"## {names}\n\n{kind.__doc__}" if names != "``" else "## The whole file"
    rows = [
        f"| `{name}` | {_allowed((*paths[0], name))} | {_default(field.default)} | {_one_line(field.description)} |"
        for name, field in kind.model_fields.items()
        if not isinstance(field.default, Node)
    ]
    return "\n".join([title, "", "| key | allowed | default | |", "| --- | --- | --- | --- |", *rows, ""])


def _allowed(keys: Keys) -> str:
    return allowed(keys).removesuffix(_QUOTING)


def _default(value: object) -> str:
    match value:
        case None:
            return ""
        case bool():
            return f"`{str(value).lower()}`"
        case StrEnum() | str() | int():
            return f"`{value}`"
        case tuple():
            return f"`[{', '.join(value)}]`"
        case _:
            return f"`{value:g}`"


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", r"\|")


def _environment() -> str:
    rows = [f"| `{variable.name}` | {variable.allowed} | {variable.sentence} |" for variable in ALL]
    return "\n".join(["## Environment", "", "| variable | allowed | |", "| --- | --- | --- |", *rows, ""])


if __name__ == "__main__":
    print(reference_text(), end="")
