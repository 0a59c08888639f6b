"""The environment of a Ray cluster of our own. Ray reads it when it is imported, so it is set before that."""

import os
import secrets


def set_for_own_cluster() -> None:
    """Choose what the user has not chosen.

    Ray listens on every interface, and whoever may talk to it may run code; so a token of this run's own guards it.
    """
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if os.environ["RAY_AUTH_MODE"] == "token" and "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
