"""Choice of the replicas of an attempt: those with room, and the policies that choose among them.

A policy is a pure function from the replicas that may take a request to the one that gets it. A new one is a function
and a line in ``POLICIES``.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random

import msgspec

from cluster.spec.config import DeployConfig, PolicyName
from cluster.spec.ids import Peer, Role, Room
from cluster.spec.worker_spec import ALONE, RouterShare
from router.directory import Breakers, Directory, Load, LoadBook
from router.page_index import PageIndex, Weights
from router.request import Attempt, GenerateRequest

_PREFIX_AWARE = "prefix_aware"
MAX_KNOWN_PAGES = 1 << 22
"""Cached pages of all replicas that the router remembers, at some 100 bytes each."""
_WEIGHTS = Weights(host=0.9, storage=0.6)
"""A page in host memory is copied much faster than it is computed; one in storage may come too late."""
MAX_IMBALANCE, MAX_RATIO = 32, 2.0
"""Requests that the busiest replica may have more than the idlest, and times as many, for the sake of cached prefixes.

Both must be exceeded, as in SGLang's router: a difference alone is common among many requests, a ratio among few.
"""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    peer: Peer
    load: Load
    cached_tokens: int = 0
    """Prompt tokens that it is known to have cached; set for ``prefix_aware`` only."""


class PickInputs(msgspec.Struct, frozen=True, kw_only=True):
    """Everything besides the candidates that a choice may depend on."""

    number: int
    """Choices made before this one."""
    unit: float
    """Uniform over [0, 1)."""
    room: Room
    session: str = ""


Policy = Callable[[Sequence[Candidate], PickInputs], Candidate]
"""Called once per request and role, with at least one candidate, ordered by replica."""


def round_robin(candidates: Sequence[Candidate], inputs: PickInputs) -> Candidate:
    return candidates[inputs.number % len(candidates)]


def at_random(candidates: Sequence[Candidate], inputs: PickInputs) -> Candidate:
    return candidates[int(inputs.unit * len(candidates))]


def follow_room(candidates: Sequence[Candidate], inputs: PickInputs) -> Candidate:
    """Pick by the room's number: whoever knows the room and the replicas knows where the request is."""
    return candidates[inputs.room % len(candidates)]


def least_requests(candidates: Sequence[Candidate], inputs: PickInputs) -> Candidate:
    return min(_rotated(candidates, inputs), key=lambda one: (one.load.num_requests, one.load.num_tokens))


def least_tokens(candidates: Sequence[Candidate], inputs: PickInputs) -> Candidate:
    return min(_rotated(candidates, inputs), key=lambda one: (one.load.num_tokens, one.load.num_requests))


def power_of_two(candidates: Sequence[Candidate], inputs: PickInputs) -> Candidate:
    """Pick the better of two at random (Mitzenmacher, 1996): nearly the best of all where loads are known late."""
    if len(candidates) == 1:
        return candidates[0]
    first, step = divmod(int(inputs.unit * len(candidates) * (len(candidates) - 1)), len(candidates) - 1)
    second = (first + 1 + step) % len(candidates)
    return least_tokens([candidates[first], candidates[second]], inputs)


def prefix_aware(candidates: Sequence[Candidate], inputs: PickInputs) -> Candidate:
    """Pick the fewest tokens less those cached of this prompt, then the fewest requests; ties alternate.

    A cached prefix is worth a queue of its own length and no longer one. Where nothing is cached, and where requests
    are spread too unevenly, this is ``least_tokens``.
    """
    counts = [candidate.load.num_requests for candidate in candidates]
    fewest, most = min(counts), max(counts)
    if most - fewest > MAX_IMBALANCE and most > MAX_RATIO * fewest:
        return least_tokens(candidates, inputs)
    return min(
        _rotated(candidates, inputs),
        key=lambda candidate: (candidate.load.num_tokens - candidate.cached_tokens, candidate.load.num_requests),
    )


def session(candidates: Sequence[Candidate], inputs: PickInputs) -> Candidate:
    """Pick the highest hash of session and replica; requests without a session go by ``least_tokens``.

    Rendezvous hashing: a replica that leaves moves only its own sessions, and a restarted one gets them back.
    """
    if not inputs.session:
        return least_tokens(candidates, inputs)
    name = inputs.session.encode()
    return max(candidates, key=lambda one: hashlib.blake2b(name, key=one.peer.replica.encode(), digest_size=8).digest())


POLICIES: Mapping[PolicyName, Policy] = {
    "round_robin": round_robin,
    "random": at_random,
    "power_of_two": power_of_two,
    "least_requests": least_requests,
    "least_tokens": least_tokens,
    "prefix_aware": prefix_aware,
    "session": session,
    "follow_room": follow_room,
}


def _rotated(candidates: Sequence[Candidate], inputs: PickInputs) -> list[Candidate]:
    """Begin with another candidate each time: ``min`` takes the first of equals."""
    first = inputs.number % len(candidates)
    return [*candidates[first:], *candidates[:first]]


class Picker:
    """The choices of one router process, which has its share of every replica's room."""

    def __init__(
        self,
        config: DeployConfig,
        directory: Directory,
        load: LoadBook,
        breakers: Breakers,
        generator: Random | None = None,
        share: RouterShare = ALONE,
    ) -> None:
        names = {Role.PREFILL: config.router.prefill_policy, Role.DECODE: config.router.decode_policy}
        self._policies = {role: POLICIES[name] for role, name in names.items()}
        self._numbers = {role: itertools.count() for role in Role}
        self._random = generator or Random()
        self._page_size = config.kv.page_size
        self._max_queued_tokens = share.of(config.prefill.max_queued_tokens)
        self._max_fill = config.decode.max_fill / share.num_processes
        self._directory = directory
        self._load = load
        self._breakers = breakers
        self._skip_below_tokens = config.prefill.skip_below_tokens
        needs_keys = {role: name == _PREFIX_AWARE for role, name in names.items()}
        needs_keys[Role.DECODE] |= self._skip_below_tokens > 0
        # Without caches nobody need hash prompts, or report pages.
        self.prefix_roles = [role for role in names if needs_keys[role] and config.kv.prefix_cache]
        """Roles whose replicas report their cached pages."""
        self.pages = PageIndex(MAX_KNOWN_PAGES)

    def why_full(self, requests: Sequence[GenerateRequest], now_s: float) -> str | None:
        """Return what must end before requests can be taken; None when there is room."""
        if not self._with_room(self._peers(Role.PREFILL, now_s)):
            limit = f"{self._max_queued_tokens} prompt tokens or more (prefill.max_queued_tokens)"
            return f"the queue is full: {limit} wait at every prefill replica; try again later"
        if not self._with_pages(self._peers(Role.DECODE, now_s), sum(_longest(request) for request in requests)):
            limit = f"{self._max_fill:g} times its KV pool (decode.max_fill)"
            return f"the queue is full: every decode replica has tokens for {limit}; try again later"
        return None

    def pick(self, request: GenerateRequest, room: Room, avoided: frozenset[Peer], now_s: float) -> Attempt | None:
        """See ``Pick``."""
        prefills = self._peers(Role.PREFILL, now_s, avoided)
        decodes = self._peers(Role.DECODE, now_s, avoided)
        if not prefills or not decodes:
            return None
        decode = self._choose(Role.DECODE, self._with_pages(decodes, _longest(request)) or decodes, request, room)
        skip_below = self._skip_below_tokens
        if skip_below and len(request.prompt_ids) - self._cached_for_sure(decode.peer, request) < skip_below:
            return Attempt(room=room, prefill=None, decode=decode.peer)
        prefill = self._choose(Role.PREFILL, self._with_room(prefills) or prefills, request, room)
        return Attempt(room=room, prefill=prefill.peer, decode=decode.peer, cached_tokens=prefill.cached_tokens)

    def _choose(self, role: Role, peers: Sequence[Peer], request: GenerateRequest, room: Room) -> Candidate:
        page_keys = request.page_keys if role in self.prefix_roles else None
        keys = page_keys.known(self.pages.is_known) if page_keys is not None else ()
        candidates = [
            Candidate(
                peer=peer,
                load=self._load.of(peer),
                cached_tokens=int(self.pages.worth(peer, keys, _WEIGHTS) * self._page_size),
            )
            for peer in peers
        ]
        number, unit = next(self._numbers[role]), self._random.random()
        inputs = PickInputs(number=number, unit=unit, room=room, session=request.session)
        return self._policies[role](candidates, inputs)

    def _peers(self, role: Role, now_s: float, avoided: frozenset[Peer] = frozenset()) -> list[Peer]:
        """Ready replicas; none that is avoided or has an open breaker, as long as others are left."""
        peers = self._directory.ready(role)
        if avoided:
            peers = [peer for peer in peers if peer not in avoided] or peers
        return self._breakers.allowed(peers, now_s)

    def _with_room(self, peers: Iterable[Peer]) -> list[Peer]:
        """Replicas below the limit, whatever the next request's length: a long one would never find more room."""
        return [peer for peer in peers if self._load.of(peer).num_tokens < self._max_queued_tokens]

    def _with_pages(self, peers: Iterable[Peer], num_tokens: int) -> list[Peer]:
        """Replicas that are idle, or would not be filled beyond the limit."""

        def fits(peer: Peer) -> bool:
            load, pool_tokens = self._load.of(peer), self._directory.pool_tokens_of(peer)
            has_room = pool_tokens is None or load.num_tokens + num_tokens <= pool_tokens * self._max_fill
            return has_room or not load.num_requests

        return [peer for peer in peers if fits(peer)]

    def _cached_for_sure(self, decode: Peer, request: GenerateRequest) -> int:
        """Tokens that decode would not have to compute; pages in storage may not come in time."""
        if Role.DECODE not in self.prefix_roles or not request.page_keys:
            return 0
        keys = request.page_keys.known(self.pages.is_known)
        return int(self.pages.worth(decode, keys, Weights(host=1.0)) * self._page_size)


def _longest(request: GenerateRequest) -> int:
    """Return the most tokens that decode keeps for this request alone."""
    return request.stopping.max_tokens + (0 if request.shares_prompt else len(request.prompt_ids))
