"""The policies by the name that the deploy YAML uses."""

from collections.abc import Mapping

from router.policies.candidate import Policy
from router.policies.follow_room import follow_room
from router.policies.least_requests import least_requests
from router.policies.least_tokens import least_tokens
from router.policies.power_of_two import power_of_two
from router.policies.prefix_aware import prefix_aware
from router.policies.random import random
from router.policies.round_robin import round_robin
from router.policies.session import session

POLICIES: Mapping[str, Policy] = {
    "round_robin": round_robin,
    "random": random,
    "power_of_two": power_of_two,
    "least_requests": least_requests,
    "least_tokens": least_tokens,
    "prefix_aware": prefix_aware,
    "session": session,
    "follow_room": follow_room,
}


def find_policy(name: str) -> Policy:
    """The policy of a name.

    Raises:
        ValueError: there is none of that name; lists those there are.
    """
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}; allowed: {', '.join(sorted(POLICIES))}")
    return POLICIES[name]
