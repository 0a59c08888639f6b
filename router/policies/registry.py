"""The policies by the name that the deploy YAML uses."""

from collections.abc import Mapping

from router.policies.candidate import Policy
from router.policies.least_tokens import least_tokens
from router.policies.random import random
from router.policies.round_robin import round_robin

POLICIES: Mapping[str, Policy] = {"round_robin": round_robin, "random": random, "least_tokens": least_tokens}


def find_policy(name: str) -> Policy:
    """The policy of a name.

    Raises:
        ValueError: there is none of that name; lists those there are.
    """
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}; allowed: {', '.join(sorted(POLICIES))}")
    return POLICIES[name]
