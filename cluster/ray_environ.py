"""Environment variables and temporary folder of a Ray cluster that Baton starts.

Ray reads the variables when it is imported.
"""

import os
import re
import secrets
import shutil
import tempfile
from pathlib import Path

_TEMP_ROOT = Path("/tmp")
"""Parent of the temporary folder; not TMPDIR, because Ray's socket paths must be short."""
_TEMP_NAME = re.compile(r"baton-ray-(\d+)-\w+")


def set_for_own_cluster() -> None:
    """Set every variable that the user has not set.

    Anyone who can reach Ray can run code, so Ray gets a new token for each run and listens on loopback only. Workers
    run at niceness 0, because at Ray's default of 15 any other load delays tokens and heartbeats. The threads of each
    process share one heap, see ``share_heap``.
    """
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if os.environ["RAY_AUTH_MODE"] == "token" and "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    # Needed on Linux too: even when given an address, Ray uses loopback only if no other machine may join.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("MALLOC_ARENA_MAX", "1")


def make_temp_dir() -> Path:
    """Create a folder for the cluster's sockets and logs; remove those that killed drivers have left behind."""
    for folder in _TEMP_ROOT.glob("baton-ray-*"):
        match = _TEMP_NAME.fullmatch(folder.name)
        if match and not Path("/proc", match[1]).exists() and folder.lstat().st_uid == os.getuid():
            shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"baton-ray-{os.getpid()}-", dir=_TEMP_ROOT))
