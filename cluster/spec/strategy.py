"""Names of the choices in parallel execution: sharding of tokens, placement of KV, exchange between ranks."""

from enum import StrEnum


class Strategy(StrEnum):
    """Ways to shard a step's extend tokens over the CP ranks of a replica."""

    NONE = "none"
    """Every rank computes every token; no collective runs."""
    WHOLE_REQUEST = "whole_request"
    """Each request goes to a single rank: the one with the least attention work so far."""
    CONTIGUOUS = "contiguous"
    """Each request is split into cp consecutive parts."""
    ZIGZAG = "zigzag"
    """Each request is split into 2*cp parts; rank r computes parts r and 2*cp-1-r."""
    INTERLEAVE = "interleave"
    """Token i of the flattened batch goes to rank i mod cp."""


ON_ONE_RANK = (Strategy.NONE, Strategy.WHOLE_REQUEST)
"""Strategies that may let one rank compute all tokens of a step."""


class StrategySetting(StrEnum):
    """Values of `prefill.strategy`."""

    AUTO = "auto"
    """The strategy with the lowest estimated time for each step."""
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
        """Candidate that may give one rank the most tokens of a step."""
        return next((each for each in ON_ONE_RANK if each in self.candidates), self.candidates[0])


class CpMode(StrEnum):
    """KV that each CP rank of a prefill replica stores."""

    GATHER = "gather"
    """All KV: every rank stores the K and V of all ranks."""
    RING = "ring"
    """The pages that the rank owns, so that a replica's KV capacity grows with cp."""


class ShardLinear(StrEnum):
    """Values of `prefill.shard_linear`: storage of a stage's query and output projections on its CP ranks."""

    NONE = "none"
    """Every rank stores all of them."""
    BROADCAST = "broadcast"
    """Every rank stores those of some layers, and sends them to the others ahead of use."""
    GATHER = "gather"
    """Every rank stores a part of the rows in each layer. All ranks gather the rows ahead of use."""


class Collectives(StrEnum):
    """Exchange of tensors between the ranks of a replica."""

    AUTO = "auto"
    """Shared memory if all ranks of a group are on one host, TCP otherwise."""
    TCP = "tcp"


class DpPolicy(StrEnum):
    """Policies that pick the DP rank of a request that does not ask for one."""

    LEAST_TOKENS = "least_tokens"
    """DP rank with the fewest prompt tokens."""
    LEAST_REQUESTS = "least_requests"
    """DP rank with the fewest requests."""
    FOLLOW_ROOM = "follow_room"
    """Room number modulo dp."""


class MoeDispatch(StrEnum):
    """Exchange of tokens between the ranks that experts are divided over."""

    AUTO = "auto"
    """The method that moves fewer bytes in each step."""
    GATHER = "gather"
    """Every rank gets all tokens, and partial sums are reduced: all-gather and reduce-scatter."""
    ALL_TO_ALL = "all_to_all"
    """Each token goes to the ranks that hold its experts."""


class Passing(StrEnum):
    """Tensors that circulate in ring mode to combine every query with every key."""

    PASS_KV = "pass_kv"
    """Keys and values, including cached ones, circulate between ranks."""
    PASS_Q = "pass_q"
    """Queries circulate, and every rank returns their attention over its own keys."""


class PassingSetting(StrEnum):
    """Values of `prefill.passing`."""

    AUTO = "auto"
    """The tensors with the lower estimated time for each step."""
    PASS_KV = Passing.PASS_KV.value
    PASS_Q = Passing.PASS_Q.value

    @property
    def candidates(self) -> tuple[Passing, ...]:
        return tuple(Passing) if self is PassingSetting.AUTO else (Passing(self.value),)
