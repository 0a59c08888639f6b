"""Environment of a Ray cluster started by Baton. Ray reads it on import, so it is set before that."""

import os
import secrets


def set_for_own_cluster() -> None:
    """Set every variable that the user has not set.

    Anyone who can talk to Ray can run code, so a token of this run's own guards it, and it listens on loopback only. By
    default Ray would also run workers at a niceness of 15, where any other load on the machine delays tokens and
    heartbeats.
    """
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if os.environ["RAY_AUTH_MODE"] == "token" and "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    # Needed on Linux too: Ray uses the loopback address only where no other machine may join, even if one is given.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")
