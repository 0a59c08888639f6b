"""Operator commands for a running cluster. Struct names are the tags of the messages to the driver."""

import msgspec

from cluster.spec.ids import ReplicaId


class _Command(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class DrainCommand(_Command, frozen=True):
    """Drain a replica until it is resumed or restarted. The command completes when the open requests have finished."""

    replica: ReplicaId
    grace_s: float | None = None
    """Maximum wait for open requests, in seconds. In all commands, None means `router.drain_s`."""


class ResumeCommand(_Command, frozen=True):
    """Let a drained replica take requests again."""

    replica: ReplicaId


class RestartCommand(_Command, frozen=True):
    """Drain and restart replicas."""

    replicas: tuple[ReplicaId, ...] = ()
    """Replicas to restart; all running ones if empty."""
    is_rolling: bool = False
    """Restart one replica at a time, and only while another of the same role takes requests."""
    grace_s: float | None = None


class ScaleCommand(_Command, frozen=True):
    """Start replicas, or drain and stop those with the highest numbers."""

    prefill: int | None = None
    """Number of prefill replicas; None leaves it unchanged."""
    decode: int | None = None
    grace_s: float | None = None
    wait_s: float = 0.0
    """Maximum wait for machines that new replicas need, in seconds. Ray's autoscaler sees what is missing."""


class StatusCommand(_Command, frozen=True):
    """List the cluster's phase unless it serves, and the members that are not running, each with the reason.

    Does not wait for other commands.
    """


OperatorCommand = DrainCommand | ResumeCommand | RestartCommand | ScaleCommand | StatusCommand
