"""What an administrator may send: which replica is meant."""

from router.api.requests import Body


class TargetRequest(Body):
    """``POST /admin/...``: one replica, or without a name what the route says."""

    replica: str | None = None
