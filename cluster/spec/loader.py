"""Loader of deploy files, which reports all problems of a file in one ConfigError."""

import copy
import difflib
import functools
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from cluster.spec.checks import config_problems
from cluster.spec.config import DeployConfig
from cluster.spec.errors import ConfigError, Problem

Tree = dict[str, Any]

BUILT_IN_FOLDERS = Path(__file__).parents[2] / "deploy", Path(sysconfig.get_path("data")) / "share" / "baton" / "deploy"
"""Folders of Baton's own deploy files: in a checkout, and as a wheel installs them."""
DEFAULT_FILE = Path("local-cpu")

_MERGE_TAG = "tag:yaml.org,2002:merge"
_TEXT_TAG = "tag:yaml.org,2002:str"
_REFUSED = {
    "decode.parallel.cp": "decode has no context parallelism, since a step computes one token per request; omit it",
}
"""Reasons for refusing keys that a user may expect."""
_LONGEST_VALUE = 60
_PATTERNS = {
    r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$": "1 to 63 lowercase letters, digits and dashes, no dash at either end",
    r"^(\*|[a-z][a-z0-9+.-]*://[^/?#*\sA-Z]+)$": "`*`, or an origin as browsers send it, such as https://chat.example",
}


def load_config(path: Path, overrides: Mapping[str, str] | None = None) -> DeployConfig:
    """Read a deploy file, given by its path or by the name of a built-in one.

    ``overrides`` has values by dotted key, as texts that are read like those in the file.

    Raises:
        ConfigError: the file cannot be read, or has problems.
    """
    return parse_config(_read(path), str(path), overrides)


def _built_in_files() -> dict[str, Path]:
    """Return the built-in deploy files by name, from the first folder that exists."""
    found = next((files for folder in BUILT_IN_FOLDERS if (files := sorted(folder.glob("*.yaml")))), [])
    return {file.stem: file for file in found if file.stem != "job"}


def parse_config(text: str, source: str, overrides: Mapping[str, str] | None = None) -> DeployConfig:
    """Parse a deploy file; ``source`` is its name in syntax errors. Raises ConfigError with every problem."""
    tree, problems = _parse(text, source)
    for key, value in (overrides or {}).items():
        _override(tree, key, value)
    config, more = _validate(tree)
    problems += more
    if problems:
        raise ConfigError(problems)
    return config


def _read(path: Path) -> str:
    is_name = path.parent == Path() and path.suffix in ("", ".yaml") and not path.is_file()
    built_in = _built_in_files() if is_name else {}
    try:
        return built_in.get(path.stem, path).read_text(encoding="utf-8")
    except FileNotFoundError:
        reason = f"no such file; built-in files: {', '.join(built_in)}" if built_in else "no such file"
    except UnicodeDecodeError as exc:
        reason = f"byte {exc.start} is not UTF-8 text"
    except OSError as exc:
        reason = f"cannot be read: {exc.strerror}"
    raise ConfigError([Problem(str(path), reason)])


def _parse(text: str, source: str) -> tuple[Tree, list[Problem]]:
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        problems = _take_keys(node, "", set())
        tree = loader.construct_document(node) if node else None
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        line = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError([Problem(source, f"{line}not YAML: {exc.problem or exc.context}")]) from exc
    except yaml.YAMLError as exc:
        raise ConfigError([Problem(source, f"not YAML: {str(exc).splitlines()[0]}")]) from exc
    except (ValueError, RecursionError) as exc:
        raise ConfigError([Problem(source, f"holds a value that cannot be read: {exc}")]) from exc
    if not isinstance(tree, dict):
        given = "is empty" if tree is None else f"got {show(tree)}"
        raise ConfigError([Problem(source, f"{given}; allowed: keys and values, or {{}} for all defaults")])
    return tree, problems


def _take_keys(node: yaml.Node | None, path: str, seen: set[int]) -> list[Problem]:
    """Turn all keys into text (YAML reads ``on`` as true), and report duplicates, which YAML accepts."""
    if not isinstance(node, yaml.MappingNode) or id(node) in seen:
        return []
    seen.add(id(node))
    problems = []
    lines: dict[str, int] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE_TAG:
            continue
        key.tag = _TEXT_TAG
        line = key.start_mark.line + 1
        inner = f"{path}.{key.value}" if path else key.value
        if key.value in lines:
            problems.append(Problem(inner, f"given twice, on lines {lines[key.value]} and {line}; allowed: once"))
        lines.setdefault(key.value, line)
        problems += _take_keys(value, inner, seen)
    return problems


def _override(tree: Tree, key: str, value: str) -> None:
    """Set one key; leave a section that is not a mapping as it is, for validation to reject."""
    *parents, leaf = key.split(".")
    for parent in parents:
        if tree.get(parent) is None:
            tree[parent] = {}
        tree = tree[parent]
        if not isinstance(tree, dict):
            return
    tree[leaf] = _scalar(value)


def _scalar(text: str) -> Any:
    """Parse a text as a plain YAML scalar, never as a list or a mapping."""
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        return text
    return text if isinstance(value, dict | list) else value


def _validate(tree: Tree) -> tuple[DeployConfig, list[Problem]]:
    """Return the configuration and its problems; keys with a problem take their defaults."""
    try:
        config = DeployConfig.model_validate(tree)
        return config, config_problems(config)
    except ValidationError as exc:
        problems = explain(exc)
        paths = [[str(part) for part in error["loc"]] for error in exc.errors()]
        config = DeployConfig.model_validate(_without(tree, paths))
        return config, problems + config_problems(config, unreadable=[".".join(path) for path in paths])


def _without(tree: Tree, paths: list[list[str]]) -> Tree:
    tree = copy.deepcopy(tree)
    for *parents, leaf in paths:
        node = tree
        for parent in parents:
            inner = node.get(parent)
            if not isinstance(inner, dict):  # one wrong item invalidates its whole list
                leaf = parent
                break
            node = inner
        node.pop(leaf, None)
    return tree


Keys = tuple[str, ...]


def explain(error: ValidationError) -> list[Problem]:
    """Return one problem per key that pydantic rejected."""
    problems = {}
    for item in error.errors(include_url=False):
        keys = tuple(str(part) for part in item["loc"])
        unknown = item["type"] == "extra_forbidden"
        message = _unknown(keys) if unknown else f"got {show(item['input'])}; allowed: {allowed(keys)}"
        problems[keys] = Problem(".".join(keys), message)
    return list(problems.values())


def show(value: object) -> str:
    """Return a value as short text in YAML's notation."""
    match value:
        case None:
            return "nothing"
        case bool():
            return str(value).lower()
        case str():
            return repr(value if len(value) <= _LONGEST_VALUE else f"{value[:_LONGEST_VALUE]}...")
        case Mapping():
            return "a mapping"
        case Sequence():
            return "a list"
        case _:
            return str(value)[:_LONGEST_VALUE]


def allowed(keys: Keys) -> str:
    """Return the allowed values of a key in words."""
    schema = _schema_of(keys)
    options = [option for option in schema.get("anyOf", [schema]) if option.get("type") != "null"]
    assert len(options) == 1, f"a key of several types has no description: {keys}"
    return _words(_resolve(options[0]))


def _unknown(keys: Keys) -> str:
    *parents, key = keys
    if (reason := _REFUSED.get(".".join(map(str, keys)))) is not None:
        return reason
    known = list(_schema_of(tuple(parents))["properties"])
    nearest = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {nearest[0]}? " if nearest else ""
    return f"unknown key; {hint}allowed: {', '.join(known)}"


@functools.cache
def _root() -> dict[str, Any]:
    return DeployConfig.model_json_schema()


def _schema_of(keys: Keys) -> dict[str, Any]:
    node = _root()
    for key in keys:
        node = _resolve(node["items"] if node.get("type") == "array" else node["properties"][key])
    return node


def _resolve(node: dict[str, Any]) -> dict[str, Any]:
    definitions: dict[str, dict[str, Any]] = _root()["$defs"]
    return definitions[node["$ref"].rsplit("/", 1)[-1]] if "$ref" in node else node


def _words(schema: dict[str, Any]) -> str:
    match schema:
        case {"enum": values}:
            return ", ".join(values)
        case {"properties": keys}:
            return f"keys and values, with the keys {', '.join(keys)}"
        case {"type": "integer"}:
            return f"a whole number{_bounds(schema)}"
        case {"type": "number"}:
            return f"a number{_bounds(schema)}"
        case {"type": "boolean"}:
            return "true or false"
        case {"pattern": pattern}:
            return _PATTERNS[pattern]
        case {"type": "array", "items": item}:
            return f"a list; each item: {_words(item)}"
        case _:
            assert schema.get("type") == "string", f"no words for {schema}"
            return "a non-empty string, in quotes if it looks like a number"


def _bounds(schema: dict[str, Any]) -> str:
    match schema:
        case {"minimum": low, "maximum": high}:
            return f" from {low} to {high}"
        case {"exclusiveMinimum": low, "maximum": high}:
            return f" over {low}, at most {high}"
        case {"minimum": low}:
            return f", {low} or more"
        case _:
            return f" over {schema['exclusiveMinimum']}"
