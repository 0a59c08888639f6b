"""What an administrator may send: which replica is meant."""

from router.api.requests import Body, SaltedBody


class TargetRequest(Body):
    """``POST /admin/...``: one replica, or without a name what the route says."""

    replica: str | None = None


class PinRequest(TargetRequest, SaltedBody):
    """``POST /admin/pin``: a prompt as text or token ids; of one replica, or without a name of all."""

    prompt: str | list[int]
