"""What the ranks of `baton bench cp` report. No torch: the process that asks needs none."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """One step on one rank."""

    seconds: float
    """From the moment all ranks were ready to the end of this rank's part."""
    waited_s: float
    """Of these, inside collectives."""
    cpu_s: float
    """Of the computing thread alone: other processes on the machine do not add to it, and waiting does not count."""
