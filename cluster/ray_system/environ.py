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
_CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Variable that Linux needs too: even when given an address, Ray uses loopback only if no other machine may join."""
_TEMP_NAME = re.compile(r"baton-ray-(\d+)-\w+")


def set_for_own_cluster() -> None:
    """Set every variable that the user has not set.

    Anyone who can reach Ray can run code, so Ray gets a new token for each run and listens on loopback only. Workers
    run at niceness 0, because at Ray's default of 15 any other load delays tokens and heartbeats.
    """
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if os.environ["RAY_AUTH_MODE"] == "token" and "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    os.environ.setdefault(_CLUSTERS, "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")


def tool_environ(address: str, temp_dir: Path | None) -> dict[str, str]:
    """Return the environment variables with which Ray's own tools reach the cluster at an address.

    The token of a cluster that Baton has started is written to a file in its folder. For any other cluster, the tools
    need what the user has set already.
    """
    found = {"RAY_ADDRESS": address}
    if temp_dir is None:
        return found
    found[_CLUSTERS] = os.environ[_CLUSTERS]
    if os.environ["RAY_AUTH_MODE"] != "token":
        return found
    path = os.environ.get("RAY_AUTH_TOKEN_PATH") or str(_write_token(temp_dir))
    return found | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": path}


def _write_token(folder: Path) -> Path:
    path = folder / "token"
    path.touch(mode=0o600)
    path.write_text(os.environ["RAY_AUTH_TOKEN"])
    return path


def make_temp_dir() -> Path:
    """Create a folder for the cluster's sockets and logs; remove those that killed drivers have left behind."""
    for folder in _TEMP_ROOT.glob("baton-ray-*"):
        match = _TEMP_NAME.fullmatch(folder.name)
        if match and not Path("/proc", match[1]).exists() and folder.lstat().st_uid == os.getuid():
            shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"baton-ray-{os.getpid()}-", dir=_TEMP_ROOT))
