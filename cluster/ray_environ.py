"""The environment of a Ray cluster of our own. Ray reads it when it is imported, so it is set before that."""

import os
import secrets


def set_for_own_cluster() -> None:
    """Choose what the user has not chosen.

    Whoever may talk to Ray may run code; so a token of this run's own guards it, and it listens on loopback only.
    It would also run workers at a niceness of 15, where whatever else the machine does delays tokens and heartbeats.
    """
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if os.environ["RAY_AUTH_MODE"] == "token" and "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    # On Linux too: where no other machine may join, Ray takes the loopback address, and not otherwise, even if told.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")
