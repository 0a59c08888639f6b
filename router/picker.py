"""Choice of the replicas for each attempt, by policy.

A policy is a pure function that chooses one of the replicas with capacity. To add a policy, write a function and list
it in ``POLICIES``.
"""

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from random import Random

import msgspec

from cluster.spec.config import DeployConfig
from cluster.spec.ids import Peer, Role, Room
from cluster.spec.router_config import PolicyName
from cluster.spec.worker_spec import ALONE, RouterShare
from router.directory import Breakers, Directory, Load, LoadBook
from router.page_index import CachedPages, PageIndex
from router.request import ANYBODY, GenerateRequest, KnownTokens, Placement

_MOST_PER_FREE = 4
"""Maximum number of tokens that a tenant may hold for each one that is free: four fifths of all if it is alone."""
_PREFIX_AWARE = "prefix_aware"
MAX_KNOWN_PAGES = 1 << 22
"""Maximum number of page keys that the router stores for all replicas, at about 100 bytes each."""
_HOST_WEIGHT, _STORAGE_WEIGHT = 0.9, 0.6
"""Value of a page in a lower tier relative to the device: copying beats computing, but storage may be too late."""
MAX_IMBALANCE, MAX_RATIO = 32, 2.0
"""Limits on the difference and ratio of open requests between the busiest and the least busy replica.

If both are exceeded, cached prefixes are ignored, as in SGLang's router. Large differences are common at high load,
large ratios at low load.
"""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    peer: Peer
    load: Load
    cached_tokens: int = 0
    """Prompt tokens in the replica's cache, weighted by tier; 0 if replicas of its role do not report their pages."""
    pages: CachedPages = CachedPages()
    """Leading pages of the prompt in the replica's cache."""


class PickInputs(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of a policy besides the candidates."""

    number: int
    """Number of earlier picks for the role."""
    unit: float
    """Random number, uniform over [0, 1)."""
    room: Room
    session_id: str = ""


Policy = Callable[[Sequence[Candidate], PickInputs], Candidate]
"""Function that picks one candidate for an attempt and role. It gets at least one candidate, sorted by replica."""


def round_robin(candidates: Sequence[Candidate], inputs: PickInputs) -> Candidate:
    return candidates[inputs.number % len(candidates)]


def at_random(candidates: Sequence[Candidate], inputs: PickInputs) -> Candidate:
    return candidates[int(inputs.unit * len(candidates))]


def follow_room(candidates: Sequence[Candidate], inputs: PickInputs) -> Candidate:
    """Pick by room number, so that anyone who knows the room and the replicas can find the request."""
    return candidates[inputs.room % len(candidates)]


def least_requests(candidates: Sequence[Candidate], inputs: PickInputs) -> Candidate:
    return min(_rotated(candidates, inputs), key=lambda one: (one.load.num_requests, one.load.num_tokens))


def least_tokens(candidates: Sequence[Candidate], inputs: PickInputs) -> Candidate:
    return min(_rotated(candidates, inputs), key=lambda one: (one.load.num_tokens, one.load.num_requests))


def power_of_two(candidates: Sequence[Candidate], inputs: PickInputs) -> Candidate:
    """Pick the less loaded of two random replicas (Mitzenmacher, 1996)."""
    if len(candidates) == 1:
        return candidates[0]
    first, step = divmod(int(inputs.unit * len(candidates) * (len(candidates) - 1)), len(candidates) - 1)
    second = (first + 1 + step) % len(candidates)
    return least_tokens([candidates[first], candidates[second]], inputs)


def prefix_aware(candidates: Sequence[Candidate], inputs: PickInputs) -> Candidate:
    """Pick the replica with the fewest queued minus cached tokens; if tied, the one with the fewest requests.

    A cached prefix outweighs a queue of at most its own length. If the load is too uneven, pick by ``least_tokens``.
    """
    counts = [candidate.load.num_requests for candidate in candidates]
    fewest, most = min(counts), max(counts)
    if most - fewest > MAX_IMBALANCE and most > MAX_RATIO * fewest:
        return least_tokens(candidates, inputs)
    return min(
        _rotated(candidates, inputs),
        key=lambda candidate: (candidate.load.num_tokens - candidate.cached_tokens, candidate.load.num_requests),
    )


def by_session(candidates: Sequence[Candidate], inputs: PickInputs) -> Candidate:
    """Pick by rendezvous hashing of the session id; without one, pick by ``least_tokens``.

    If a replica leaves, only its own sessions move, and they return when it restarts.
    """
    if not inputs.session_id:
        return least_tokens(candidates, inputs)
    name = inputs.session_id.encode()
    return max(candidates, key=lambda one: hashlib.blake2b(name, key=one.peer.replica.encode(), digest_size=8).digest())


POLICIES: Mapping[PolicyName, Policy] = {
    "round_robin": round_robin,
    "random": at_random,
    "power_of_two": power_of_two,
    "least_requests": least_requests,
    "least_tokens": least_tokens,
    "prefix_aware": prefix_aware,
    "session": by_session,
    "follow_room": follow_room,
}


def _rotated(candidates: Sequence[Candidate], inputs: PickInputs) -> list[Candidate]:
    """Return the candidates rotated differently each time, because ``min`` returns the first of equal ones."""
    first = inputs.number % len(candidates)
    return [*candidates[first:], *candidates[:first]]


def _worth(pages: CachedPages) -> float:
    return pages.device + _HOST_WEIGHT * pages.host + _STORAGE_WEIGHT * pages.storage


class Picker:
    """Chooses replicas for one router process, which uses its share of each replica's capacity."""

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
        self.prefix_roles = [role for role in names if needs_keys[role] and config.kv.prefix_cache]
        """Roles whose replicas report their cached pages. If there are none, prompts are not hashed."""
        self.pages = PageIndex(MAX_KNOWN_PAGES)

    def why_full(self, requests: Sequence[GenerateRequest], now_s: float) -> str | None:
        """Return the reason why a queue is full, or None if the requests can be sent."""
        if not any(map(self._has_room, self._peers(Role.PREFILL, now_s))):
            limit = f"{self._max_queued_tokens} prompt tokens or more (prefill.max_queued_tokens)"
            return f"the queue is full: {limit} wait at every prefill replica; try again later"
        num_tokens, tenant = sum(request.decode_len for request in requests), requests[0].tenant
        if not any(self._has_pages(peer, num_tokens, tenant) for peer in self._peers(Role.DECODE, now_s)):
            limit = f"the tokens of every decode replica could exceed {self._max_fill:g} times its KV pool"
            own = "" if tenant == ANYBODY else f", or those of this key {_MOST_PER_FREE} times what is free"
            return f"the queue is full: with this request, {limit}{own} (decode.max_fill); try again later"
        return None

    def pick(self, request: GenerateRequest, room: Room, avoided: frozenset[Peer], now_s: float) -> Placement | None:
        """Choose the replicas of an attempt that shares no prompt. Return None if a role has no ready replica."""
        prefills = self._peers(Role.PREFILL, now_s, avoided)
        decodes = self._peers(Role.DECODE, now_s, avoided)
        if not prefills or not decodes:
            return None
        with_pages = [peer for peer in decodes if self._has_pages(peer, request.max_len, request.tenant)]
        decode = self._choose(Role.DECODE, with_pages or decodes, request, room)
        # Pages in storage do not count, since they may come too late.
        num_uncached = len(request.prompt_ids) - decode.pages.in_memory * self._page_size
        if request.is_probe or num_uncached < self._skip_below_tokens:
            return Placement(prefill=None, decode=decode.peer)
        with_room = [peer for peer in prefills if self._has_room(peer)]
        prefill = self._choose(Role.PREFILL, with_room or prefills, request, room)
        known = KnownTokens(sum(prefill.pages) * self._page_size, prefill.pages.in_memory * self._page_size)
        return Placement(prefill=prefill.peer, decode=decode.peer, cached_tokens=prefill.cached_tokens, known=known)

    def _choose(self, role: Role, peers: Sequence[Peer], request: GenerateRequest, room: Room) -> Candidate:
        keys = self._keys(role, request)
        cached = self.pages.cached(peers, keys)
        candidates = [
            Candidate(
                peer=peer, load=self._load.of(peer), cached_tokens=int(_worth(pages) * self._page_size), pages=pages
            )
            for peer, pages in zip(peers, cached, strict=True)
        ]
        number, unit = next(self._numbers[role]), self._random.random()
        inputs = PickInputs(number=number, unit=unit, room=room, session_id=request.session_id)
        return self._policies[role](candidates, inputs)

    def _peers(self, role: Role, now_s: float, avoided: frozenset[Peer] = frozenset()) -> list[Peer]:
        """Return the ready replicas. Skip avoided ones and those with open breakers, unless no others are left."""
        peers = self._directory.ready(role)
        if avoided:
            peers = [peer for peer in peers if peer not in avoided] or peers
        return self._breakers.allowed(peers, now_s)

    def _has_room(self, peer: Peer) -> bool:
        """Return whether a replica is below the limit, whatever the next length, so that long requests get a turn."""
        return self._load.of(peer).num_tokens < self._max_queued_tokens

    def _has_pages(self, peer: Peer, num_tokens: int, tenant: str) -> bool:
        """Return whether a replica is idle or has capacity for these tokens.

        A tenant may hold a multiple of what is free, so that some is always free for others: a dynamic threshold
        (Choudhury and Hahne, 1998), as in switches whose ports share a buffer.
        """
        load, pool_tokens = self._load.of(peer), self._directory.pool_tokens_of(peer)
        if pool_tokens is None or not load.num_requests:
            return True
        free = pool_tokens * self._max_fill - load.num_tokens
        held = self._load.tokens_of(peer, tenant) if tenant != ANYBODY else 0
        return num_tokens <= free and held + num_tokens <= _MOST_PER_FREE * free

    def _keys(self, role: Role, request: GenerateRequest) -> Sequence[bytes]:
        """Return the keys of the prompt's pages that replicas of this role may have cached."""
        keys = request.page_keys if role in self.prefix_roles else None
        return keys.known(self.pages.is_known) if keys is not None else ()
