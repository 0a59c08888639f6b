"""The names of context parallelism: how a step's tokens are cut over CP ranks, and how they meet their keys."""

from enum import StrEnum


class Strategy(StrEnum):
    """How the extend tokens of a step are divided over the CP ranks of a replica."""

    NONE = "none"
    """Every rank computes every token; no collective runs."""
    WHOLE_REQUEST = "whole_request"
    """Each request is computed by one rank; ranks are filled by the least attention work."""
    CONTIGUOUS = "contiguous"
    """Each request is cut into cp consecutive parts."""
    ZIGZAG = "zigzag"
    """Each request is cut into 2*cp parts; rank r computes parts r and 2*cp-1-r."""
    INTERLEAVE = "interleave"
    """Token i of the flattened batch goes to rank i mod cp."""


ON_ONE_RANK = (Strategy.NONE, Strategy.WHOLE_REQUEST)
"""Those with which one rank may compute all tokens of a step."""


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

    @property
    def fullest(self) -> Strategy:
        """The one of them with which one rank may compute most tokens of a step: all, where that is possible."""
        return next((each for each in ON_ONE_RANK if each in self.candidates), self.candidates[0])


class CpMode(StrEnum):
    """Which KV a CP rank of a prefill replica holds."""

    GATHER = "gather"
    """All of it: every rank stores the K and V of all ranks."""
    RING = "ring"
    """The pages it owns, so that the KV capacity of a replica grows with cp."""


class Collectives(StrEnum):
    """How the ranks of a replica exchange tensors."""

    AUTO = "auto"
    """Through shared memory if all of a group are on one host, over TCP otherwise."""
    TCP = "tcp"


class DpPolicy(StrEnum):
    """Which DP rank of a replica gets a request that asks for none."""

    LEAST_TOKENS = "least_tokens"
    """The one with the fewest prompt tokens."""
    LEAST_REQUESTS = "least_requests"
    """The one with the fewest requests."""
    FOLLOW_ROOM = "follow_room"
    """The room's number modulo dp."""


class MoeDispatch(StrEnum):
    """How tokens meet their experts where ranks share them."""

    AUTO = "auto"
    """The way that moves fewer bytes, step by step."""
    GATHER = "gather"
    """Every rank gets all tokens, and sums come back: all-gather and reduce-scatter."""
    ALL_TO_ALL = "all_to_all"
    """Each token goes to the ranks that hold its experts."""


class Passing(StrEnum):
    """What goes round in ring mode, so that all queries of a step meet all keys."""

    PASS_KV = "pass_kv"
    """The keys and values, cached ones included, go from rank to rank."""
    PASS_Q = "pass_q"
    """The queries go to every rank, and what they found in its cached keys comes back."""


class PassingSetting(StrEnum):
    """What may be asked for: one passing for every step, or the better one for each."""

    AUTO = "auto"
    """The passing with the least estimated time, step by step."""
    PASS_KV = Passing.PASS_KV.value
    PASS_Q = Passing.PASS_Q.value

    @property
    def candidates(self) -> tuple[Passing, ...]:
        """The passings that a step may run with."""
        return tuple(Passing) if self is PassingSetting.AUTO else (Passing(self.value),)
