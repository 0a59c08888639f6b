"""The same replica for every request of a session, as long as that replica is there."""

import hashlib
from collections.abc import Sequence

from router.policies.candidate import Candidate, Chance
from router.policies.least_tokens import least_tokens


def session(candidates: Sequence[Candidate], chance: Chance) -> Candidate:
    """The highest hash of session and replica (rendezvous hashing: a replica that leaves moves only its own sessions).

    Requests without a session go where the least work is.
    """
    if not chance.session:
        return least_tokens(candidates, chance)
    return max(candidates, key=lambda candidate: _weight(chance.session, candidate.peer.replica))


def _weight(session_id: str, replica: str) -> bytes:
    # A start of a replica does not count: its successor takes its sessions over.
    return hashlib.blake2b(session_id.encode(), key=replica.encode(), digest_size=8).digest()
