"""Identifiers that travel between processes: types, not bare strings and integers."""

import re
import secrets
from typing import NewType

Room = NewType("Room", int)
"""Meeting point of one attempt of one request: 63 random bits, never reused."""

ReplicaId = NewType("ReplicaId", str)
"""Replica name ``<role>-<index>``, for example ``prefill-0``; stable across restarts."""

Incarnation = NewType("Incarnation", int)
"""Start number of a replica; a later start has a higher one."""

ROUTER = ReplicaId("router")
"""Name of a router among replicas: it has incarnations, too."""

_REPLICA_ID = re.compile(r"^(prefill|decode)-(\d{1,9})$")


def draw_room() -> Room:
    """Draw a fresh room, uniform over [1, 2**63)."""
    return Room(secrets.randbits(63) or 1)


def router_names(num_processes: int) -> list[ReplicaId]:
    """Return the names of a cluster's router processes."""
    return [ROUTER, *(ReplicaId(f"{ROUTER}-{index}") for index in range(1, num_processes))]


def is_router(name: str) -> bool:
    """Return whether this is the name of a router process."""
    return name == ROUTER or re.fullmatch(rf"{ROUTER}-\d{{1,9}}", name) is not None


def replica_id(role: str, index: int) -> ReplicaId:
    """Return the id of the index-th replica of a role.

    Raises:
        ValueError: the role is not ``prefill`` or ``decode``, or the index is negative.
    """
    return parse_replica_id(f"{role}-{index}")


def parse_replica_id(text: str) -> ReplicaId:
    """Check a replica id that came from outside.

    Raises:
        ValueError: the text is not ``<role>-<index>``.
    """
    if not _REPLICA_ID.match(text):
        raise ValueError(f"replica id {text!r} is not of the form prefill-<n> or decode-<n>")
    return ReplicaId(text)
