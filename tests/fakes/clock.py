"""A clock that tests set."""

from dataclasses import dataclass


@dataclass
class ManualClock:
    time_s: float = 0.0

    def now_s(self) -> float:
        return self.time_s
