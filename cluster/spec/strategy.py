"""Names of context parallelism: how a step's tokens are sharded over CP ranks, and how they meet their keys."""

from enum import StrEnum


class Strategy(StrEnum):
    """Division of a step's extend tokens over the CP ranks of a replica."""

    NONE = "none"
    """Every rank computes every token; no collective runs."""
    WHOLE_REQUEST = "whole_request"
    """Each request is computed by one rank; ranks are filled by the least attention work."""
    CONTIGUOUS = "contiguous"
    """Each request is split into cp consecutive parts."""
    ZIGZAG = "zigzag"
    """Each request is split into 2*cp parts; rank r computes parts r and 2*cp-1-r."""
    INTERLEAVE = "interleave"
    """Token i of the flattened batch goes to rank i mod cp."""


ON_ONE_RANK = (Strategy.NONE, Strategy.WHOLE_REQUEST)
"""Strategies with which one rank may compute all tokens of a step."""


class StrategySetting(StrEnum):
    """Configurable value: one strategy for every step, or the best one for each."""

    AUTO = "auto"
    """The strategy with the least estimated time, step by step."""
    NONE = Strategy.NONE.value
    WHOLE_REQUEST = Strategy.WHOLE_REQUEST.value
    CONTIGUOUS = Strategy.CONTIGUOUS.value
    ZIGZAG = Strategy.ZIGZAG.value
    INTERLEAVE = Strategy.INTERLEAVE.value

    @property
    def candidates(self) -> tuple[Strategy, ...]:
        return tuple(Strategy) if self is StrategySetting.AUTO else (Strategy(self.value),)

    @property
    def fullest(self) -> Strategy:
        """Return the candidate with which one rank may compute the most tokens of a step: all, if possible."""
        return next((each for each in ON_ONE_RANK if each in self.candidates), self.candidates[0])


class CpMode(StrEnum):
    """KV that each CP rank of a prefill replica holds."""

    GATHER = "gather"
    """All of it: every rank stores the K and V of all ranks."""
    RING = "ring"
    """The pages it owns, so that the KV capacity of a replica grows with cp."""


class Collectives(StrEnum):
    """Exchange of tensors between the ranks of a replica."""

    AUTO = "auto"
    """Through shared memory if all of a group are on one host, over TCP otherwise."""
    TCP = "tcp"


class DpPolicy(StrEnum):
    """Choice of the DP rank of a replica for a request without a preference."""

    LEAST_TOKENS = "least_tokens"
    """DP rank with the fewest prompt tokens."""
    LEAST_REQUESTS = "least_requests"
    """DP rank with the fewest requests."""
    FOLLOW_ROOM = "follow_room"
    """Room number modulo dp."""


class MoeDispatch(StrEnum):
    """Exchange of tokens between ranks that share experts."""

    AUTO = "auto"
    """Method that moves fewer bytes, step by step."""
    GATHER = "gather"
    """Every rank gets all tokens, and partial sums are reduced: all-gather and reduce-scatter."""
    ALL_TO_ALL = "all_to_all"
    """Each token goes to the ranks that hold its experts."""


class Passing(StrEnum):
    """Tensors that circulate in ring mode, so that all queries of a step meet all keys."""

    PASS_KV = "pass_kv"
    """The keys and values, cached ones included, go from rank to rank."""
    PASS_Q = "pass_q"
    """The queries go to every rank, and their attention over its cached keys comes back."""


class PassingSetting(StrEnum):
    """Configurable value: one passing for every step, or the better one for each."""

    AUTO = "auto"
    """The passing with the least estimated time, step by step."""
    PASS_KV = Passing.PASS_KV.value
    PASS_Q = Passing.PASS_Q.value

    @property
    def candidates(self) -> tuple[Passing, ...]:
        return tuple(Passing) if self is PassingSetting.AUTO else (Passing(self.value),)
