"""Environment variables of a Ray cluster that Baton starts. Ray reads them when it is imported."""

import os
import secrets


def set_for_own_cluster() -> None:
    """Set every variable that the user has not set.

    Anyone who can reach Ray can run code, so Ray gets a new token for each run and listens on loopback only. Workers
    run at niceness 0, because at Ray's default of 15 any other load delays tokens and heartbeats.
    """
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if os.environ["RAY_AUTH_MODE"] == "token" and "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    # Needed on Linux too: even when given an address, Ray uses loopback only if no other machine may join.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")
