"""The `baton` command line. User errors and errors of files are printed on stderr, in one line, with exit code 2."""

import errno
import importlib.util
import signal
import sys
from pathlib import Path

from cluster.spec.errors import UserError


def _check_packages() -> None:
    """Raise UserError if a file of the current folder would be imported instead of one of Baton's packages."""
    root = Path(__file__).parents[2]
    for name in ("cluster", "router", "transfer", "workers"):
        spec = importlib.util.find_spec(name)
        found = Path(spec.origin or "") if spec is not None else root
        if not found.is_relative_to(root):
            raise UserError(f"{found} hides Baton's package {name!r}: rename it, or run this command in another folder")


def main() -> None:
    try:
        _check_packages()
        from cluster.cli.app import app  # only now, since it imports the packages

        app()
    except UserError as exc:
        sys.stderr.write(f"{exc}\n")
        sys.exit(2)
    except OSError as error:
        if error.filename is None and error.errno != errno.ENOSPC:
            raise
        sys.stderr.write(f"{error.filename or 'output'}: {error.strerror}\n")
        sys.exit(2)
    except KeyboardInterrupt:  # while importing
        sys.exit(128 + signal.SIGINT)
