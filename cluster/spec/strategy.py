"""The names of the context-parallel strategies: how one step's tokens are cut over CP ranks."""

from enum import StrEnum


class Strategy(StrEnum):
    """How the extend tokens of a step are divided over the CP ranks of a replica."""

    NONE = "none"
    """Every rank computes every token; no collective runs."""
    WHOLE_REQUEST = "whole_request"
    """Each request is computed by one rank; ranks are filled by fewest tokens."""
    CONTIGUOUS = "contiguous"
    """Each request is cut into cp consecutive parts."""
    ZIGZAG = "zigzag"
    """Each request is cut into 2*cp parts; rank r computes parts r and 2*cp-1-r."""
    INTERLEAVE = "interleave"
    """Token i of the flattened batch goes to rank i mod cp."""


class StrategySetting(StrEnum):
    """What may be asked for: one strategy for every step, or the best one for each."""

    AUTO = "auto"
    """The strategy with the least estimated time, step by step."""
    NONE = Strategy.NONE.value
    WHOLE_REQUEST = Strategy.WHOLE_REQUEST.value
    CONTIGUOUS = Strategy.CONTIGUOUS.value
    ZIGZAG = Strategy.ZIGZAG.value
    INTERLEAVE = Strategy.INTERLEAVE.value

    @property
    def candidates(self) -> tuple[Strategy, ...]:
        """The strategies that a step may run with."""
        return tuple(Strategy) if self is StrategySetting.AUTO else (Strategy(self.value),)
