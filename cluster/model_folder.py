"""Contents of files in a model folder. Python code is read and never run."""

import ast
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from cluster.spec.errors import UserError

_LFS_POINTER = b"version https://git-lfs"


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty one if there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold a JSON object, but holds a {type(content).__name__}")
    return content


def is_lfs_pointer(path: Path) -> bool:
    """Return whether a file is what Git keeps in place of a large one until `git lfs pull`. Raises OSError."""
    with path.open("rb") as opened:
        return opened.read(len(_LFS_POINTER)) == _LFS_POINTER


def assigned_text(path: Path, name: str) -> str | None:
    """Return the text that is assigned to ``name`` in a file, alone or joined from a list. None if there is none."""
    code = ast.Module([], [])
    with suppress(SyntaxError, ValueError):
        code = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(code):
        match node:
            case ast.Assign(targets=[ast.Name(id=found)], value=value) if found == name:
                if (text := _text_of(value)) is not None:
                    return text
    return None


def _text_of(value: ast.expr) -> str | None:
    match value:
        case ast.Constant(value=str(text)):
            return text
        case ast.Call(
            func=ast.Attribute(value=ast.Constant(value=str(between)), attr="join"), args=[ast.List() as parts]
        ):
            with suppress(ValueError, TypeError):
                return between.join(ast.literal_eval(parts))
    return None
