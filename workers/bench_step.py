"""What `baton bench cp` asks of its ranks, and what they report. No torch: the process that asks needs none."""

from dataclasses import dataclass

from cluster.spec.strategy import CpMode, PassingSetting, StrategySetting


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to compute a step."""

    cp: int
    mode: CpMode = CpMode.GATHER
    strategy: StrategySetting = StrategySetting.NONE
    passing: PassingSetting | None = None
    """None where the mode passes nothing."""


@dataclass(frozen=True, slots=True)
class StepLens:
    """The prompt of a step."""

    prompt_len: int
    prefix_len: int
    """Tokens that count as cached before the prompt."""

    @property
    def total(self) -> int:
        """Tokens that have KV in the end."""
        return self.prompt_len + self.prefix_len


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """One step on one rank."""

    seconds: float
    """From the moment all ranks were ready to the end of this rank's part."""
    waited_s: float
    """Of these, inside collectives."""
    cpu_s: float
    """Of the computing thread alone: other processes on the machine do not add to it, and waiting does not count."""
    attention_s: float
    """Of cpu_s, inside attention; merges of partials are not."""
