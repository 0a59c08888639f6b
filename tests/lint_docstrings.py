"""Check the docstrings in the given folders: their first word must not depend on context, and no line may end early.

Run as ``python -m tests.lint_docstrings FOLDER ...``. A tooltip shows the first sentence alone, so it begins with a
noun phrase or a verb.
"""

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

WORDS = """
Of Those These That Same As What Whatever Whose Whether Where By Beside Besides For In With Without Within To
From On At If How Which Whichever When While Who Whoever Behind But And Or Nor Not So Also Then Until After
Before Because Since Though Although Among Between Under Over Into Out Than It They Them This Here Its Their
"""
DANGLING = re.compile(rf"The (same|like|other|others)\b|({'|'.join(WORDS.split())})\b(?!-)")


def main(folders: list[str]) -> int:
    if not folders:
        sys.exit("usage: python -m tests.lint_docstrings FOLDER ...")
    missing = [folder for folder in folders if not Path(folder).is_dir()]
    if missing:
        sys.exit(f"not a folder: {', '.join(missing)}")
    found = [line for folder in folders for path in sorted(Path(folder).rglob("*.py")) for line in offenders(path)]
    print(*found, sep="\n", end="\n" if found else "")
    if found:
        print(f"{len(found)} docstrings begin with a dangling word (not a noun phrase or a verb) or have short lines")
    return 1 if found else 0


def offenders(path: Path) -> Iterator[str]:
    for line, docstring in docstrings(ast.parse(path.read_text(encoding="utf-8"))):
        if DANGLING.match(docstring):
            yield f"{path}:{line}: {first_sentence(docstring)}"
        for short, after in pairwise(inspect.cleandoc(docstring).splitlines()):
            if short[:1].isalpha() and short[-1] != ":" and after[:1].isalpha() and fits(short, after):
                yield f"{path}:{line}: {short}"


def fits(line: str, after: str) -> bool:
    """Return whether the next line's first two words fit, even at the deepest usual indentation."""
    return len(" ".join([line, *after.split()[:2]])) <= 80


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of every module, class, function and attribute docstring."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for index, statement in enumerate(node.body):
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    # A flag's docstring may begin with "Whether ...". A function's begins with "Return whether ...".
                    yield statement.lineno, text.strip().removeprefix("Whether " if index else "")


def first_sentence(docstring: str) -> str:
    return re.split(r"(?<=[.:;])\s", " ".join(docstring.split()), maxsplit=1)[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
