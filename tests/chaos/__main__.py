"""Inject every fault into a real cluster and report its effect on clients: ``python -m tests.chaos [--table FILE]``."""

import argparse
import sys
from pathlib import Path

import pytest

from tests.chaos.report import LINES, as_table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the table there, in Markdown")
    parser.add_argument("-k", dest="words", default="", metavar="WORDS", help="only these scenarios, as pytest's -k")
    given = parser.parse_args()
    code = pytest.main(["-m", "chaos", "-k", given.words, str(Path(__file__).parent)])
    if given.table is not None:
        given.table.write_text(as_table(LINES) + "\n", encoding="utf-8")
    sys.exit(code)


if __name__ == "__main__":
    main()
