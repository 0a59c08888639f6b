"""Operator commands for a running cluster; struct names are tags on the wire to the driver."""

import msgspec

from cluster.spec.ids import ReplicaId


class _Command(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Frozen, keyword-only base."""


class DrainCommand(_Command, frozen=True):
    """Command to drain a replica until it is resumed or restarted; done when its open requests have ended."""

    replica: ReplicaId
    grace_s: float | None = None
    """Maximum wait for open requests; `router.drain_s` by default, as in the other commands."""


class ResumeCommand(_Command, frozen=True):
    """Command to let a replica take requests again."""

    replica: ReplicaId


class RestartCommand(_Command, frozen=True):
    """Command to drain and restart replicas."""

    replicas: tuple[ReplicaId, ...] = ()
    """Replicas to restart; all running ones by default."""
    is_rolling: bool = False
    """True to restart one after another, each only while another one of its role takes requests."""
    grace_s: float | None = None


class ScaleCommand(_Command, frozen=True):
    """Command to change the number of replicas: new ones start, those with the highest numbers drain and stop."""

    prefill: int | None = None
    """Number of prefill replicas; None leaves it unchanged."""
    decode: int | None = None
    grace_s: float | None = None


class StatusCommand(_Command, frozen=True):
    """Query for members that are not running, and why; one line each. Changes nothing, and waits for no other
    command.
    """


Command = DrainCommand | ResumeCommand | RestartCommand | ScaleCommand | StatusCommand
