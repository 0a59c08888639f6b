"""One client's check, run with the Python that has the client: ``python -m tests.clients.run NAME URL FOLDER``.

Prints what was checked, on one line. FOLDER holds the tokenizer.
"""

import sys
from importlib import import_module
from pathlib import Path


def main(name: str, url: str, folder: str) -> None:
    print(import_module(f"tests.clients.scripts.{name}").check(url, Path(folder)))


if __name__ == "__main__":
    main(*sys.argv[1:])
