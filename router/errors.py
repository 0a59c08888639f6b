"""Why a request got no answer, or an incomplete one."""

from cluster.spec.errors import BatonError
from router.request import Cause


class NotReadyError(BatonError):
    """No request can be taken now; names what is missing."""


class LimitError(BatonError):
    """A limit is reached for now."""

    def __init__(self, message: str, limit: str = "", retry_after_s: int = 1) -> None:
        """``limit`` is the name of the setting."""
        self.limit = limit
        self.retry_after_s = retry_after_s
        super().__init__(message)


class QueueFullError(LimitError):
    """No request can be taken before some of the open ones are computed; says how many there are."""


class KeyLimitError(LimitError):
    """The client's key has reached a limit; says which."""


class NoAnswerError(BatonError):
    """A replica has not answered in time."""


class RefusedError(BatonError):
    """The router or a replica cannot do what an administrator wants; says which, and why."""


class ClientLeftError(BatonError):
    """The client closed its connection before the answer was complete."""


class RequestFailedError(BatonError):
    """A request that was taken ended without a complete answer."""

    def __init__(self, cause: Cause, reason: str) -> None:
        self.cause = cause
        super().__init__(reason)
